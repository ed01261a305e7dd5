"""A model folder's own Python is never run, whatever is answered at the terminal, and nothing pickled is
read: chat.py 4, model.py 5 and 6, quartet.quantized 3."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet.config import ConfigError
from quartet_inference.chat import Chat
from quartet_inference.embedded.model import load
from safetensors.torch import load_file


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


def test_pickled_weights_are_not_read(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ConfigError, match=r"no file named model\.safetensors"):
        load(folder, "float32", weights_follow=False)


def test_an_adapter_beside_a_model_is_refused(model_folder: Path, tmp_path: Path) -> None:
    """transformers would load it, from adapter_model.bin too, or the model that it names instead."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    for weights_follow in (False, True):
        with pytest.raises(ConfigError, match=r"\(adapter_config\.json\), .* with it; move that elsewhere$"):
            load(folder, "float32", weights_follow=weights_follow)
    (folder / "model.safetensors").unlink()
    load(folder, "float32", weights_follow=True)  # of whose weights none are read
