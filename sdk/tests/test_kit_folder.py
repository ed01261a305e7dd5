"""Folders of a service: one process at a time, and whether they can be used."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from quartet.config import ConfigError
from quartet.kit.folder import check_folder, is_full, lock_file


def test_a_lock_keeps_others_out_until_it_is_closed(tmp_path: Path) -> None:
    """folder.py 1."""
    with lock_file(tmp_path / "lock"), pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock")
    lock_file(tmp_path / "lock").close()


def test_a_lock_ends_with_a_process_that_is_killed_and_its_file_is_in_nobodys_way(tmp_path: Path) -> None:
    """folder.py 1: or a run whose launcher was killed would never go on."""
    file = tmp_path / "lock"
    program = (
        "import pathlib, sys, time\n"
        "from quartet.kit.folder import lock_file\n"
        f"held = lock_file(pathlib.Path({str(file)!r}))\n"
        "print('locked', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
            with pytest.raises(BlockingIOError):
                lock_file(file)
        finally:
            holder.kill()
    assert file.exists()
    lock_file(file).close()


def test_a_folder_is_looked_at_and_not_made(tmp_path: Path) -> None:
    """folder.py 2."""
    check_folder("data_dir", tmp_path / "new" / "deep")
    assert not list(tmp_path.iterdir())
    check_folder("data_dir", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "folder",
    [
        "/proc/x",
        "{tmp}/file",
        "{tmp}/file/below",
        "{tmp}/" + "n" * 300,
        "{tmp}/nowhere",
        "{tmp}/nowhere/x",
        "{tmp}/ring/x",
    ],
)
def test_a_folder_that_cannot_be_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "ring").symlink_to(tmp_path / "ring")
    with pytest.raises(
        ConfigError, match=r"^data_dir = '.*' cannot be used: .* name a folder that this user"
    ):
        check_folder("data_dir", Path(folder.format(tmp=tmp_path)))


def test_a_full_disk_is_seen_and_nothing_is_left_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """folder.py 2."""
    assert not is_full(tmp_path) and not list(tmp_path.iterdir())
    assert not is_full(tmp_path / "gone"), "which says nothing of its disk"
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
        assert is_full(tmp_path)
