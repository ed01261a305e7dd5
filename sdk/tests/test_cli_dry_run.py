"""What `quartet rl --dry-run` prints: the run, whole, as a file, and what would be where."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from planned_runs import CONFIG
from quartet.cli.__main__ import main
from quartet.config import validate
from quartet.run.config import RunConfig


@pytest.fixture(autouse=True)
def any_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interpreter of environments is looked for."""
    monkeypatch.setattr("quartet.cli.rl.with_interpreters", lambda envhost, _: envhost)


def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], *keys: str) -> tuple[list[str], RunConfig]:
    """The lines of comments, and the run."""
    (model := tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    words = ["rl", "@", str(CONFIG), "--model", str(model), "--envhost.python", sys.executable]
    assert main([*words, "--output-dir", str(tmp_path / "out"), *keys, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    comments, _, run = text.partition("\n\n")
    return comments.split("\n"), validate(RunConfig, tomllib.loads(run))


def test_a_run_is_shown_whole_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keeps = ["--ckpt.keep-last", "5", "--ckpt.keep-interval", "40"]
    comments, run = shown(tmp_path, capsys, "--max-steps", "7", "--trainer.threads", "2", *keeps)
    assert comments == ["# on this machine: trainer, inference, envhost, orchestrator"]
    assert (run.max_steps, run.trainer["threads"]) == (7, 2)
    assert (run.ckpt.keep_last, run.ckpt.keep_interval) == (5, 40)
    assert run.weight_decay == 0, "which the file does not say"


def test_several_machines_are_shown_with_what_is_on_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = ["--trainer.nodes=2", "--inference.nodes=1", "--inference.replicas=2", "--trainer.ranks=2"]
    comments, run = shown(tmp_path, capsys, *nodes)
    assert comments == [
        "# on machine 1: trainer (2 ranks), envhost, orchestrator",
        "# on machine 2: trainer-2 (2 ranks)",
        "# on machine 3: inference-1, inference-2",
    ]
    assert run.trainer["nodes"] == 2


def test_named_machines_are_shown_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ["--hosts", "127.0.8.4,127.0.8.5", "--first-port", "5010", "--inference.nodes=1"]
    comments, _ = shown(tmp_path, capsys, *hosts)
    assert comments == [
        "# on 127.0.8.4: trainer, envhost, orchestrator",
        "# on 127.0.8.5: inference",
    ]


def test_devices_are_shown_as_they_were_shared_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    comments, _ = shown(tmp_path, capsys, "--trainer.gpus=0", "--inference.gpus=2")
    assert comments == [
        "# on this machine: trainer (no GPU), inference-1 (GPU 0), inference-2 (GPU 1), envhost, orchestrator"
    ]
