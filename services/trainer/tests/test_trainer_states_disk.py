"""States on a disk: flushed before they are named, killed at every moment, full, away, slow."""

from __future__ import annotations

import errno
import io
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quartet.errors import QuartetError
from quartet.kit.repeated import Repeated
from quartet_trainer import disk, placing, states
from quartet_trainer.content import Content
from quartet_trainer.states import StateStore
from safetensors import SafetensorError
from structlog.testing import capture_logs

from .saved_states import content, save


def written_and_renamed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """What is flushed, and the new names that are given, in this order; is added to from here on."""
    done: list[tuple[str, Path]] = []
    plain = {"rename": Path.rename, "replace": Path.replace}
    plain_sync = os.fsync

    def sync(descriptor: int) -> None:
        done.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        plain_sync(descriptor)

    def noting(how: str) -> Callable[[Path, Path], Path]:
        def named(path: Path, target: Path) -> Path:
            done.append(("name", target))
            return plain[how](path, target)

        return named

    monkeypatch.setattr(os, "fsync", sync)
    for how in plain:
        monkeypatch.setattr(Path, how, noting(how))
    return done


class Killed(BaseException):
    """Nothing after it is done."""


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("moment", range(8))
def test_a_state_of_a_name_and_number_is_there_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, kept: bool
) -> None:
    """states.py 1 and 6, placing.py 1 to 3: killed before or after each renaming; it may be the only one. The
    call that is repeated leaves one, also of a state that stays."""
    store = StateStore(tmp_path, 1)
    save(store, "a", 1)
    left, plain = [moment], Path.rename

    def rename(path: Path, target: Path) -> Path:
        if left[0] == 0:
            raise Killed
        done = plain(path, target)
        left[0] -= 2
        if left[0] == -1:
            raise Killed
        return done

    def nothing(*_: object, **__: object) -> None:
        """What a process that was killed does not do either."""

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        if moment < 6:  # with so many renamings it is through
            patched.setattr(states.shutil, "rmtree", nothing)
            with pytest.raises(Killed):
                store.save("r", "a", 1, 0, content(2.0), kept=kept)
        else:
            store.save("r", "a", 1, 0, content(2.0), kept=kept)
    found = StateStore(tmp_path, 1).newest_sound("r")
    assert found is not None and found[0].name == "a"
    assert found[1].meta["value"] == (2.0 if moment >= 1 else 1.0)
    again = StateStore(tmp_path, 2)
    again.save("r", "a", 1, 0, content(3.0), kept=kept)
    (info,) = again.list("r")
    assert again.read(info).meta["value"] == 3.0
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["a@1"]


def test_a_state_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """states.py 1: after a power cut a name without contents would be a state that is harmed."""
    flushed: set[str] = set()
    plain_sync, plain_rename, named = os.fsync, Path.rename, []

    def sync(descriptor: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        plain_sync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        missing = {str(one) for one in (tmp_path, path, *path.rglob("*"))} - flushed
        assert not missing
        flushed.clear()
        named.append(target.name)
        return plain_rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    save(StateStore(tmp_path, 3), "a", 1, export=lambda target: (target / "deep").mkdir(parents=True))
    assert named == ["a@1"]
    assert str(tmp_path / "r") in flushed, "and then the name is, too"


def test_the_older_of_two_equal_states_goes_when_the_disk_knows_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """states.py 1 and 6: a disk may lose names after a power cut, in any order that it was not told."""
    store, folder = StateStore(tmp_path, 3), tmp_path / "r"
    save(store, "a", 1)
    done = written_and_renamed(monkeypatch)
    save(store, "a", 1)
    beside = done.index(("name", folder / "a@1@again"))
    discarded = next(path for _, path in done if path.name.startswith("@discarded-a@1@"))
    assert done[beside:] == [
        ("name", folder / "a@1@again"),
        ("flush", folder),
        ("name", discarded),
        ("name", folder / "a@1"),
        ("flush", folder),
    ]


def test_a_return_to_a_state_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """states.py 4: after a power cut, too; and no ORDER is there without its number."""
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)
    save(store, "b", 2)
    info = store.find("r", "a")
    done = written_and_renamed(monkeypatch)
    store.touch("r", info)
    assert done == [
        ("flush", info.path / "ORDER.new"),
        ("name", info.path / "ORDER"),
        ("flush", info.path),
    ]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "make room there"),
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "make room there",
        ),
        (SafetensorError("I/O error: File too large (os error 27)"), "raise .* file's size \\(ulimit -f\\)"),
        (SafetensorError("Error while serializing"), "make room there"),
    ],
)
def test_a_full_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, remedy: str
) -> None:
    """Invariant 9, states.py 7: NOT_READY, which callers repeat; what was there stays, and it succeeds."""
    monkeypatch.setattr(disk, "_told", Repeated())
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)

    def full(target: Path) -> None:
        raise error

    with capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(QuartetError, match=f"NOT_READY.*; {remedy}$") as caught:
                save(store, "b", 2, export=full)
            assert caught.value.message.endswith(caught.value.metadata["remedy"])
    assert [one["event"] for one in logs].count("disk_failed") == 1, "and not for every try"
    assert [info.name for info in store.list("r")] == ["a"]
    save(store, "b", 2)
    assert [info.name for info in store.list("r")] == ["a", "b"]


@pytest.mark.parametrize("unread", ["COMPLETE.json", "ORDER", "weights.safetensors", "run.json"])
def test_invariant_9_a_state_that_cannot_be_read_now_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unread: str
) -> None:
    """states.py 7. As harm it would be: the run would go on from an older one, and replace it."""
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)
    save(store, "b", 2)
    opened = io.open

    def away(file: object, *args: object, **kwargs: object) -> object:
        if str(file).endswith(f"b@2/{unread}"):
            raise OSError(errno.EIO, "Input/output error")
        return opened(file, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(io, "open", away)
        with pytest.raises(QuartetError, match=r"NOT_READY.*Input/output error"):
            store.newest_sound("r")
    found = store.newest_sound("r")
    assert found is not None and found[0].name == "b"


def test_a_state_is_not_made_the_newest_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)
    save(store, "b", 2)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(QuartetError, match=r"NOT_READY.*No space left on device"):
            store.touch("r", store.find("r", "a"))
    assert store.list("r")[-1].name == "b"


def test_a_large_state_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """disk.py 2 and 3: hashed, flushed, read again; on a slow disk each takes longer than a stuck worker is
    given."""
    monkeypatch.setattr(disk, "READ_BYTES", 4096)
    heard: list[int] = []
    store = StateStore(tmp_path, 2, progress=lambda: heard.append(1))
    large = Content({}, {"weights": {"w": torch.zeros(1 << 14)}})
    store.save("r", "a", 1, 0, large)
    written = len(heard)
    assert written >= (1 << 16) // 4096 + 3, "for each piece, and each file that is flushed"
    assert store.newest_sound("r") is not None
    assert len(heard) >= written + (1 << 16) // 4096


def test_what_one_call_writes_is_progress_while_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """disk.py 1: a file of tensors, and the model's."""
    monkeypatch.setattr(disk, "LOOK_SECONDS", 0.02)
    heard: list[float] = []
    store = StateStore(tmp_path, 2, progress=lambda: heard.append(time.monotonic()))

    def slowly(target: Path) -> None:
        """One file, each piece once the last was heard; then nothing any more, as where the disk hangs."""
        target.mkdir()
        with (target / "model.safetensors").open("wb", buffering=0) as file:
            for _ in range(5):
                before, end = len(heard), time.monotonic() + 60
                file.write(bytes(1 << 16))
                while len(heard) == before and time.monotonic() < end:
                    time.sleep(0.01)
                written.append(len(heard) - before)
        time.sleep(0.1)
        before = len(heard)
        time.sleep(0.2)
        written.append(len(heard) - before)

    written: list[int] = []
    store.save("r", "a", 1, 0, Content({}, {}), slowly)
    *grew, hung = written
    assert len(grew) == 5 and all(grew) and hung == 0
    assert not [one for one in threading.enumerate() if one.name == "growing"]


def test_a_large_file_is_flushed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """disk.py 2"""
    heard: list[int] = []
    (file := tmp_path / "large").write_bytes(bytes(5 * mmap.PAGESIZE + 7))
    monkeypatch.setattr(disk, "FLUSHED_BYTES", 2 * mmap.PAGESIZE)
    for path, times in ((file, 3 + 1), (tmp_path, 1)):
        heard.clear()
        disk.flush(path, lambda: heard.append(1))
        assert len(heard) == times
    assert file.read_bytes() == bytes(5 * mmap.PAGESIZE + 7)


def test_a_state_is_saved_where_an_older_one_does_not_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """states.py 7. Refused, its number would be free for another call, which the state then says was done."""
    store = StateStore(tmp_path, 1)
    save(store, "a", 1)
    plain = Path.rename

    def busy(path: Path, target: Path) -> Path:
        if path.name == "a@1":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return plain(path, target)

    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(Path, "rename", busy)
        save(store, "b", 2)
    assert [line["why"] for line in logs if line["event"] == "states_not_pruned"]
    assert [info.name for info in store.list("r")] == ["a", "b"]
    save(store, "c", 3)
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["c@3"]


def test_what_was_left_of_a_state_is_in_no_other_one_s_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """placing.py 3: as where another machine reads it, and the disk keeps what it reads."""
    store = StateStore(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(placing, "delete_left", lambda left: None)
        for _ in range(3):
            save(store, "a", 1)
        assert len(list((tmp_path / "r").iterdir())) == 3
    assert [info.seq_id for info in store.list("r")] == [1]
    save(store, "b", 2)
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["b@2"]
