"""`quartet sft`: the adapter that it begins with is looked at before anything starts (command.py 1)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from adapter_files import MODULES, matrices, model, weights
from quartet.adapter_config import SETTINGS, WEIGHTS
from quartet.cli.__main__ import main
from sft_chats import CHAT, stop_at_once, written

TARGETS = ["q_proj", "v_proj"]


@pytest.fixture
def begin(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command on the model of adapter_files, with a trainer that would take every run."""
    stop_at_once(monkeypatch)
    base = model(tmp_path / "model")
    shutil.copytree(
        chat_model, base, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json", "*.safetensors")
    )
    data = written(tmp_path, {"messages": CHAT})
    asked = ["sft", "--model", str(base), "--data", str(data), "--output-dir", str(tmp_path / "out")]
    return lambda *more: main([*asked, "--lora.enabled", "true", *more])


def adapter(folder: Path, layers: int = 2, width: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": TARGETS}
    (folder / SETTINGS).write_text(json.dumps(given))
    modules = {name: (rows, width) for name, (rows, _) in MODULES.items()}
    weights(folder / WEIGHTS, matrices(TARGETS, 2, layers=layers, modules=modules))
    return folder


@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_all_that_does_not_fit_is_told_and_nothing_starts(
    tmp_path: Path, begin: Callable[..., int], capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    folder = adapter(tmp_path / "adapter", layers=3, width=6)
    assert begin("--lora.initial-adapter", str(folder), "--lora.r", "16", *more) == 2
    told = capsys.readouterr().err
    for part in (
        f"error: lora.r = 16 is refused: the adapter in {folder} has 2; set that, or leave lora.r out",
        f"lora.initial_adapter = {str(folder)!r} is refused: it has matrices of model.layers.2.self_attn",
        "are of other shapes in model (the first: [8, 4] there, [8, 6] here)",
    ):
        assert part in told, part
    assert not (tmp_path / "out").exists()


def test_one_that_fits_is_written_down_and_one_that_goes_on_does_not_look(
    tmp_path: Path, begin: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = adapter(tmp_path / "adapter")
    named = ("--lora.initial-adapter", str(folder))
    assert begin(*named, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "r = 2" in out and f'initial_adapter = "{folder}"' in out
    assert begin(*named) == 130
    adapter(folder, layers=3, width=6)
    assert begin(*named, "--resume") == 130, "it began with what was there"
    shutil.rmtree(folder)
    assert begin(*named, "--resume") == 130
