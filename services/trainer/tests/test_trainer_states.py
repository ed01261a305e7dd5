"""States: whole or absent, harmed ones noticed, old ones pruned."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from quartet.errors import QuartetError
from quartet_trainer import states
from quartet_trainer.states import StateInfo, StateStore
from structlog.testing import capture_logs

from .saved_states import save


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
def test_a_state_of_which_nobody_knows_the_place_stands_where_its_sequence_ends(
    tmp_path: Path, order: str | None
) -> None:
    """states.py 4. ORDER is outside the digests: without it a state is whole, and no older one is taken for
    the newest."""
    store = StateStore(tmp_path, 2)
    save(store, "a", 1)
    save(store, "b", 2)
    file = tmp_path / "r" / "b@2" / "ORDER"
    file.unlink() if order is None else file.write_text(order)
    with capture_logs() as logs:
        found = store.newest_sound("r")
    assert found is not None and found[1].meta == {"value": 2.0}
    assert [line["path"] for line in logs if line["event"] == "state_order_lost"] == [str(file.parent)]
    save(store, "c", 3)
    assert [info.name for info in store.list("r")] == ["b", "c"]


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


def test_a_state_that_was_returned_to_is_the_newest(tmp_path: Path) -> None:
    """states.py 4."""
    store = StateStore(tmp_path, 3)
    save(store, "a", 1)
    save(store, "b", 2)
    store.touch("r", store.find("r", "a"))
    found = store.newest_sound("r")
    assert found is not None and found[0].name == "a"


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


@pytest.mark.parametrize("gone", [True, False])
def test_a_state_is_sound_without_the_model_beside_it(tmp_path: Path, gone: bool) -> None:
    """states.py 2: who moved it away, to make room, has not lost the run."""

    def export(target: Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"weights")

    store = StateStore(tmp_path, 2)
    save(store, "a", 1, export=export)
    model = tmp_path / "r" / "a@1" / "model"
    shutil.rmtree(model) if gone else flip_a_bit(model / "model.safetensors")
    found = store.newest_sound("r")
    assert found is not None and (found[0].model_path is None) == gone
