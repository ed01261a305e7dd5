"""A model folder's own Python is never run, whatever is answered at the terminal: chat.py 4, model.py 4."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from quartet.config import ConfigError
from quartet_inference.chat import Chat
from quartet_inference.embedded.model import load


@pytest.fixture
def bringing_code(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files name a module of its own; somebody answers "y" to every question."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    classes = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": [None, "own.Own"]}
    changed: dict[str, dict[str, Any]] = {
        "config.json": {"model_type": "own", "architectures": ["Own"]},
        "tokenizer_config.json": {"tokenizer_class": "Own"},
    }
    for name, more in changed.items():
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | more | {"auto_map": classes}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr(builtins, "input", lambda _: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def test_a_tokenizer_of_its_own_is_refused(bringing_code: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="custom code"):
        Chat(bringing_code)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("weights_follow", [False, True])
def test_a_model_of_its_own_is_refused(bringing_code: Path, tmp_path: Path, *, weights_follow: bool) -> None:
    if weights_follow:
        (bringing_code / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="custom code"):
        load(bringing_code, "float32", weights_follow=weights_follow)
    assert not (tmp_path / "ran").exists()
