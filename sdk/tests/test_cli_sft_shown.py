"""`quartet sft` in Weights & Biases, by the real library: offline, read back from the file that it writes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import wandb_file
from quartet.cli.__main__ import main
from quartet.cli.elsewhere.reporter import reporting
from quartet.cli.outputs import append_line
from quartet.cli.sft import command
from quartet.cli.sft.metrics import step_row, validation_row
from quartet.cli.sft.place import cut_metrics, taken
from quartet.cli.sft.reported import ending_of, looked_at, run_of
from quartet.cli.sft.validation import Measured
from quartet.cli.tiny.files import write_model_files
from quartet.cli.wandb.place import WeightsAndBiases
from quartet.run.sft import SftConfig
from quartet.v1.trainer_service_pb2 import ForwardBackwardResponse, OptimStepResponse


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty home folder, and nothing of this machine's own settings of wandb."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))


@pytest.fixture
def config(tmp_path: Path) -> SftConfig:
    write_model_files(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    chat = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat))
    return SftConfig(
        model=str(tmp_path / "model"),
        data=tmp_path / "chats.jsonl",
        lora={"enabled": True, "r": 4},
        trainer={"threads": 2},
        wandb={"project": "p", "mode": "offline", "tags": ["a"]},
    )


def write_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        done = ForwardBackwardResponse(loss=1 / step, tokens=8, loss_tokens=4)
        row = step_row(step, done, OptimStepResponse(learning_rate=0.5), 1.0)
        append_line(folder / "metrics.jsonl", row)
        append_line(folder / "metrics.jsonl", validation_row(step, Measured(2 / step, 0.5, 5), 1.0))


async def report(config: SftConfig, folder: Path) -> str:
    with reporting(WeightsAndBiases(config.wandb), folder, lambda line: None) as reporter:
        reporter.begin(run_of(folder, config))
        async with looked_at(reporter):
            await asyncio.sleep(0.01)
        return reporter.finish(ending_of(config, 2))


def written_of(folder: Path) -> wandb_file.Written:
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return wandb_file.read(file)


async def test_it_is_shown_as_a_run_is(config: SftConfig, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    with taken(folder, config, resume=False):
        write_steps(folder, 1, 2)
        assert (await report(config, folder)).startswith("Weights & Biases: written down; wandb sync /")
    written = written_of(folder)
    assert [(row["_step"], row["step"]) for row in written.history] == [(2, 1), (3, 1), (4, 2), (5, 2)]
    assert [row["train/loss"] for row in written.history[::2]] == [1.0, 0.5]
    assert [row["val/loss"] for row in written.history[1::2]] == [2.0, 1.0]
    assert written.x_axes == {"step": "", "*": "step"}
    assert written.run["display_name"] == "mine" and written.run["tags"] == ["a"]
    assert written.config["lora"]["r"] == 4 and written.config["run_id"] == "mine"
    assert not {"wandb", "trainer"} & written.config.keys(), "as of a run"
    assert (written.summary["phase"], written.summary["steps"]) == ("completed", 2)
    assert written.summary["val/loss"] == 1.0 and written.exit_code == 0


async def test_gone_on_with_it_is_the_same_run_there(config: SftConfig, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    with taken(folder, config, resume=False):
        write_steps(folder, 1, 2)
        await report(config, folder)
    before = written_of(folder)
    await asyncio.sleep(1.1)  # the library names folders by the second
    with taken(folder, config, resume=True):
        cut_metrics(folder, 1)
        write_steps(folder, 2)
        await report(config, folder)
    after = written_of(folder)
    assert after.run["run_id"] == before.run["run_id"]
    assert [row["_step"] for row in after.history] == [row["_step"] for row in before.history]


def test_a_complete_one_is_told_again_and_not_trained(
    config: SftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def accepts(specs: object) -> None:
        """The trainer would take it."""

    monkeypatch.setattr(command, "check", accepts)
    folder = tmp_path / "mine"
    keys = ["--model", config.model, "--data", str(config.data), "--lora.enabled", "--lora.r", "4"]
    with taken(folder, config, resume=False):
        write_steps(folder, 1, 2)
    (folder / "checkpoint").mkdir()
    again: Any = ["sft", *keys, "--output-dir", str(folder), "--resume"]
    assert main(again) == 2
    said = capsys.readouterr().err
    assert "is complete; name another" in said and f"with model = '{folder / 'checkpoint'}'" in said
    assert main([*again, "--wandb.project", "p", "--wandb.mode", "offline"]) == 0
    assert "is complete" in (said := capsys.readouterr().out) and "wandb sync" in said
    assert [row["_step"] for row in written_of(folder).history] == [2, 3, 4, 5]


def test_without_a_key_it_is_refused_before_anything_starts(
    config: SftConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["--model", config.model, "--data", str(config.data), "--output-dir", str(tmp_path / "mine")]
    assert main(["sft", *keys, "--wandb.project", "p"]) == 2
    assert "no API key is found; run 'wandb login'" in capsys.readouterr().err
    assert main(["sft", *keys, "--wandb.name", "x"]) == 2
    assert "wandb.name is set, and wandb.project is not" in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()
