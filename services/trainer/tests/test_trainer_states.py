"""States: whole or absent, harmed ones noticed, old ones pruned."""

from __future__ import annotations

import errno
import io
import mmap
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from quartet.errors import QuartetError
from quartet_trainer import disk, states
from quartet_trainer.content import Content
from quartet_trainer.states import StateStore
from safetensors import SafetensorError


def content(value: float) -> Content:
    return Content({"value": value}, {"weights": {"w": torch.full((5,), value)}})


def save(store: StateStore, name: str, seq_id: int, **more: object) -> None:
    store.save("r", name, seq_id, seq_id // 2, content(float(seq_id)), **more)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_content_comes_back(tmp_path: Path) -> None:
    """states.py 1."""
    store = StateStore(tmp_path, 2)
    save(store, "a", 4)
    (info,) = store.list("r")
    read = store.read(info)
    assert (info.name, info.seq_id, info.policy_version, info.model_path) == ("a", 4, 2, None)
    assert read.meta == {"value": 4.0}
    assert torch.equal(read.tensors["weights"]["w"], torch.full((5,), 4.0))


def test_only_the_newest_are_kept_and_an_equal_name_is_replaced(tmp_path: Path) -> None:
    """states.py 4 and 6."""
    store = StateStore(tmp_path, 2)
    for seq_id, name in enumerate("abac", start=1):
        save(store, name, seq_id)
    assert [(info.name, info.seq_id) for info in store.list("r")] == [("a", 3), ("c", 4)]
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["a@3", "c@4"]


@pytest.mark.parametrize("file", ["weights.safetensors", "run.json"])
def test_a_harmed_state_is_noticed_and_passed_over(tmp_path: Path, file: str) -> None:
    """states.py 2."""
    store = StateStore(tmp_path, 3)
    save(store, "old", 1)
    save(store, "new", 2)
    flip_a_bit(tmp_path / "r" / "new@2" / file)
    with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH"):
        store.read(store.find("r", "new"))
    found = store.newest_sound("r")
    assert found is not None and found[0].name == "old"


def test_a_state_without_its_mark_does_not_exist(tmp_path: Path) -> None:
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)
    (tmp_path / "r" / "a@1" / "COMPLETE.json").unlink()
    assert store.list("r") == []
    with pytest.raises(QuartetError, match="RESOURCE_UNKNOWN"):
        store.find("r", "a")


@pytest.mark.parametrize("file", ["COMPLETE.json", "weights.safetensors"])
def test_of_a_state_that_was_found_nothing_is_loaded_once_a_file_is_gone(tmp_path: Path, file: str) -> None:
    """states.py 2."""
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)
    info = store.find("r", "a")
    (info.path / file).unlink()
    with pytest.raises(QuartetError, match=f"CHECKSUM_MISMATCH.*{file}"):
        store.read(info)


def test_a_save_that_fails_leaves_nothing_and_what_a_kill_left_is_swept(tmp_path: Path) -> None:
    """states.py 1 and 6."""
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)

    def breaks(target: Path) -> None:
        target.mkdir()
        raise OSError("disk full")

    with pytest.raises(QuartetError, match="disk full"):
        save(store, "a", 2, export=breaks)
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["a@1"]
    (tmp_path / "r" / "@writing-a@2").mkdir()
    save(store, "a", 2)
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["a@2"]


def test_what_cannot_be_deleted_fails_no_save_and_goes_with_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """states.py 7."""

    def busy(path: Path, ignore_errors: bool = False) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    store = StateStore(tmp_path, 1)
    save(store, "a", 1)
    with monkeypatch.context() as patched:
        patched.setattr(states.shutil, "rmtree", busy)
        for seq_id in (2, 3):
            save(store, "a", seq_id)
    assert [info.seq_id for info in store.list("r")] == [3]
    assert len(list((tmp_path / "r").iterdir())) == 3
    save(store, "a", 4)
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["a@4"]


def test_the_same_seq_id_can_be_saved_again(tmp_path: Path) -> None:
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)
    save(store, "a", 1)
    assert [info.seq_id for info in store.list("r")] == [1]


class Killed(BaseException):
    """Nothing after it is done."""


@pytest.mark.parametrize("moment", range(8))
def test_a_state_of_a_name_and_number_is_there_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """states.py 1 and 6: killed before or after each renaming; it may be the only one there is."""
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
                store.save("r", "a", 1, 0, content(2.0))
        else:
            store.save("r", "a", 1, 0, content(2.0))
    found = StateStore(tmp_path, 1).newest_sound("r")
    assert found is not None and found[0].name == "a"
    assert found[1].meta["value"] == (2.0 if moment >= 1 else 1.0)
    again = StateStore(tmp_path, 1)
    again.save("r", "a", 1, 0, content(3.0))
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


def test_a_state_that_was_returned_to_is_the_newest(tmp_path: Path) -> None:
    """states.py 4."""
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)
    save(store, "b", 2)
    store.touch("r", store.find("r", "a"))
    found = store.newest_sound("r")
    assert found is not None and found[0].name == "a"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_waited_for(tmp_path: Path, error: Exception) -> None:
    """Invariant 9, states.py 7: NOT_READY, which callers repeat; what was there stays, and it succeeds."""
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)

    def full(target: Path) -> None:
        raise error

    with pytest.raises(QuartetError, match=r"NOT_READY.*No space left on device.*make room"):
        save(store, "b", 2, export=full)
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


def test_states_of_another_release_are_neither_passed_over_nor_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """states.py 5. As harm, they would be: the run would begin anew, and replace them."""
    store = StateStore(tmp_path, 2)
    save(store, "a", 1)
    with monkeypatch.context() as patched:
        patched.setattr(states, "FORMAT", states.FORMAT + 1)
        with pytest.raises(QuartetError, match="INVALID_CONFIG") as caught:
            StateStore(tmp_path, 2).newest_sound("r")
        assert f"format {states.FORMAT - 1}" in caught.value.message and "release" in caught.value.message
    assert store.newest_sound("r") is not None


def test_a_large_state_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashed, flushed, and read again: on a slow disk each takes longer than a stuck worker is given."""
    monkeypatch.setattr(states, "_READ_BYTES", 4096)
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
