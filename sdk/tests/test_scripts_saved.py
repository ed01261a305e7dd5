"""`save_model`: into folders that are there (quartet.scripts.saved)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from quartet.config import ConfigError
from quartet.scripts.saved import export_model

#: As `quartet export` does: a folder of its own, or none.
EXPORT = """
import sys
from pathlib import Path
target = Path(sys.argv[2])
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


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^save_model = '.*/file' cannot be used: .* takes no files"):
        export_model(tmp_path, tmp_path / "file", print, RuntimeError)
