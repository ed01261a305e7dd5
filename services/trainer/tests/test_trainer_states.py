"""States: whole or absent, harmed ones noticed, old ones pruned."""

from __future__ import annotations

import errno
import io
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quartet.errors import QuartetError
from quartet.kit.repeated import Repeated
from quartet_trainer import disk, states
from quartet_trainer.content import Content
from quartet_trainer.states import StateInfo, StateStore
from safetensors import SafetensorError
from structlog.testing import capture_logs


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
    sizes = {path.name: path.stat().st_size for path in info.path.iterdir()}
    assert info.size_bytes == sizes["run.json"] + sizes["weights.safetensors"]
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


@pytest.mark.parametrize(
    "said", ["", "[]", "{}", '{"digest": "0"}', '{"digest": "0", "files": {}}', "7", "policy"]
)
def test_a_state_whose_mark_is_harmed_does_not_exist(tmp_path: Path, said: str) -> None:
    """mark.py 2 and states.py 2: what a harmed mark says of the state is not believed."""
    store = StateStore(tmp_path, 3)
    save(store, "old", 1)
    save(store, "new", 2)
    mark = tmp_path / "r" / "new@2" / "COMPLETE.json"
    if said == "policy":
        said = mark.read_text().replace('"policy_version": 1', '"policy_version": 7')
        assert said != mark.read_text()
    mark.write_text(said)
    assert [info.name for info in store.list("r")] == ["old"]
    found = store.newest_sound("r")
    assert found is not None and found[0].name == "old"


def test_what_lies_among_the_states_is_none(tmp_path: Path) -> None:
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)
    (tmp_path / "r" / "notes.txt").write_text("of somebody")
    (tmp_path / "r" / "folder").mkdir()
    assert [info.name for info in store.list("r")] == ["a"]
    save(store, "b", 2)
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["a@1", "b@2", "folder", "notes.txt"]


def test_a_state_that_is_replaced_while_it_is_looked_at_is_found_in_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is fetched, and states are counted, beside the thread that saves."""
    store, plain, looked_at = StateStore(tmp_path, 1), states.state_at, list[str]()
    save(store, "a", 1)

    def too_late(path: Path) -> StateInfo | None:
        looked_at.append(path.name)
        if len(looked_at) == 1:
            save(StateStore(tmp_path, 1), "a", 2)
        return plain(path)

    monkeypatch.setattr(states, "state_at", too_late)
    with capture_logs() as logs:
        assert [info.seq_id for info in store.list("r")] == [2]
    assert logs == []


def test_states_that_are_deleted_while_they_are_looked_at_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no fault of the disk: a deletion takes the folder away."""
    store, plain = StateStore(tmp_path, 1), states.state_at
    save(store, "a", 1)

    def too_late(path: Path) -> StateInfo | None:
        path.parent.rename(tmp_path / "@deleted-r")
        return plain(path)

    monkeypatch.setattr(states, "state_at", too_late)
    with capture_logs() as logs:
        assert store.list("r") == [] and logs == []


@pytest.mark.parametrize("order", [None, "", "first"])
def test_a_state_of_which_nobody_knows_the_place_is_the_oldest(tmp_path: Path, order: str | None) -> None:
    """ORDER is outside the digests: without it a state is whole, and found."""
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)
    save(store, "b", 2)
    file = tmp_path / "r" / "b@2" / "ORDER"
    file.unlink() if order is None else file.write_text(order)
    assert [info.name for info in store.list("r")] == ["b", "a"]
    assert store.read(store.find("r", "b")).meta == {"value": 2.0}


def test_of_one_name_the_newer_state_is_found(tmp_path: Path) -> None:
    """states.py 6: killed before the older one went."""
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)
    shutil.copytree(tmp_path / "r" / "a@1", tmp_path / "kept")
    save(store, "a", 2)
    (tmp_path / "kept").rename(tmp_path / "r" / "a@1")
    assert store.find("r", "a").seq_id == 2
    save(store, "b", 3)
    save(store, "a", 4)
    assert [(info.name, info.seq_id) for info in store.list("r")] == [("b", 3), ("a", 4)]


def test_where_a_state_is_holds_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers hand the path to other programs, such as the export of a model."""
    monkeypatch.chdir(tmp_path)
    store = StateStore(Path("states"), 3)
    save(store, "a", 1)
    monkeypatch.chdir("/")
    assert store.find("r", "a").path == tmp_path / "states" / "r" / "a@1"


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
    """states.py 7, placing.py 3."""

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


def test_the_older_of_two_equal_states_goes_when_the_disk_knows_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """states.py 1 and 6: a disk may lose names after a power cut, in any order that it was not told."""
    store, folder = StateStore(tmp_path, 3), tmp_path / "r"
    save(store, "a", 1)
    done = written_and_renamed(monkeypatch)
    save(store, "a", 1)
    beside = done.index(("name", folder / "a@1@again"))
    assert done[beside:] == [
        ("name", folder / "a@1@again"),
        ("flush", folder),
        ("name", folder / "@discarded-a@1"),
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


def test_a_state_that_was_returned_to_is_the_newest(tmp_path: Path) -> None:
    """states.py 4."""
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)
    save(store, "b", 2)
    store.touch("r", store.find("r", "a"))
    found = store.newest_sound("r")
    assert found is not None and found[0].name == "a"


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
