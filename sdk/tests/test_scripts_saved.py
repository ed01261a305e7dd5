"""`save_model`: into folders that are there (quartet.scripts.saved)."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest
from quartet.config import ConfigError
from quartet.scripts.saved import copy_model, export_model

INDEX = "model.safetensors.index.json"
#: As `quartet export` does: a folder of its own, or none.
EXPORT = """
import sys
from pathlib import Path
target = Path(sys.argv[2])
if (Path(sys.argv[1]) / "refused").exists():
    sys.exit(f"error: {target} and {target.parent}/.model.x/model/file cannot be written")
target.mkdir()
(target / "model.safetensors").write_text("newest")
(target / "adapter").mkdir()
(target / "adapter" / "weights").write_text("newest")
print(target)
"""


@pytest.fixture(autouse=True)
def export(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(folder: Path, target: Path) -> list[str]:
        return [sys.executable, "-c", EXPORT, str(folder), str(target)]

    monkeypatch.setattr("quartet.cli.export.export_command", command)


def test_the_model_of_what_was_stopped_is_saved_as_often_as_somebody_wants(tmp_path: Path) -> None:
    """saved.py 1: a script saves a tokenizer there first, and is stopped again."""
    target, said = tmp_path / "model", list[str]()
    export_model(tmp_path, target, said.append, RuntimeError)
    (target / "model.safetensors").write_text("of a state before")
    (target / "tokenizer.json").write_text("own")
    export_model(tmp_path, target, said.append, RuntimeError)
    assert {
        str(file.relative_to(target)): file.read_text() for file in target.rglob("*") if file.is_file()
    } == {
        "model.safetensors": "newest",
        "adapter/weights": "newest",
        "tokenizer.json": "own",
    }
    assert said == [str(target)] * 2


@pytest.mark.parametrize("now", [["model.safetensors"], ["model-00001-of-00001.safetensors", INDEX]])
def test_weights_of_the_model_before_go(now: list[str], tmp_path: Path) -> None:
    """saved.py 2: beside one in parts it is the whole one that transformers loads."""
    before = [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    own = ["tokenizer.json", "model_card.md", "my-model.safetensors", "adapter_model.safetensors"]
    target, checkpoint = tmp_path / "model", tmp_path / "checkpoint"
    for folder, names in ((target, [*before, *own]), (checkpoint, now)):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(folder.name)
    copy_model(checkpoint, target)
    assert {one.name: one.read_text() for one in target.iterdir()} == {
        **dict.fromkeys(own, "model"),
        **dict.fromkeys(now, "checkpoint"),
    }


def test_a_folder_that_is_there_stays_as_private_as_it_is(tmp_path: Path) -> None:
    """saved.py 3."""
    target, model = tmp_path / "model", tmp_path / "checkpoint"
    target.mkdir(mode=0o700)
    (model / "adapter").mkdir(parents=True)
    (model / "adapter" / "weights").write_text("trained")
    for save in (
        lambda: export_model(tmp_path, target, str, RuntimeError),
        lambda: copy_model(model, target),
    ):
        save()
        assert target.stat().st_mode & 0o777 == 0o700
    assert (target / "adapter" / "weights").read_text() == "trained"


def test_what_cannot_be_written_is_told_by_the_folder_that_was_named(tmp_path: Path) -> None:
    """saved.py 1: the one that it is made in is gone by then."""
    (tmp_path / "refused").touch()
    (target := tmp_path / "model").mkdir()
    with pytest.raises(RuntimeError) as failed:
        export_model(tmp_path, target, print, RuntimeError)
    assert str(failed.value) == f"{target} and {target}/.model.x/model/file cannot be written"
    assert list(target.iterdir()) == []


def test_what_a_killed_writer_left_goes_once_nobody_writes_there(tmp_path: Path) -> None:
    """saved.py 4: each is as large as the model."""
    (target := tmp_path / "model").mkdir()
    for left in (target / ".quartet-model-a1b2", target / ".quartet-model-c3d4" / "model"):
        left.mkdir(parents=True)
        (left / "model.safetensors").write_text("half")
    (target / ".quartet").write_text("own")
    another = os.open(target, os.O_RDONLY)
    fcntl.flock(another, fcntl.LOCK_SH)
    export_model(tmp_path, target, str, RuntimeError)
    assert len(list(target.glob(".quartet-model-*"))) == 2
    os.close(another)
    export_model(tmp_path, target, str, RuntimeError)
    assert {one.name for one in target.iterdir()} == {".quartet", "model.safetensors", "adapter"}


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^save_model = '.*/file' cannot be used: .* takes no files"):
        export_model(tmp_path, tmp_path / "file", print, RuntimeError)
