"""What `quartet rl --dry-run` prints: the run, whole, as a file, and what would be where."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from planned_runs import CONFIG
from quartet.cli.__main__ import main
from quartet.cli.sft import command
from quartet.config import validate
from quartet.run.config import RunConfig
from quartet.run.sft import SftConfig
from sft_chats import CHAT, written


@pytest.fixture(autouse=True)
def any_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interpreter of environments is looked for."""
    monkeypatch.setattr("quartet.cli.rl.with_interpreters", lambda envhost, _: envhost)


def words(tmp_path: Path) -> list[str]:
    """A command that has its model."""
    (model := tmp_path / "model").mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    run = ["rl", "@", str(CONFIG), "--model", str(model), "--envhost.python", sys.executable]
    return [*run, "--output-dir", str(tmp_path / "out")]


def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], *keys: str) -> tuple[list[str], RunConfig]:
    """The lines of comments, and the run."""
    assert main([*words(tmp_path), *keys, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    comments, _, run = text.partition("\n\n")
    tomllib.loads(text)
    return comments.split("\n"), validate(RunConfig, tomllib.loads(run))


def test_a_run_is_shown_whole_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keeps = ["--ckpt.keep-last", "5", "--ckpt.keep-interval", "40"]
    comments, run = shown(tmp_path, capsys, "--max-steps", "7", "--trainer.threads", "2", *keeps)
    assert comments == ["# on this machine: trainer, inference, envhost, orchestrator"]
    assert (run.max_steps, run.trainer["threads"]) == (7, 2)
    assert (run.ckpt.keep_last, run.ckpt.keep_interval) == (5, 40)
    assert run.weight_decay == 0, "which the file does not say"


def test_what_is_left_out_and_depends_on_the_loss_is_told_and_no_part_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    penalty = [
        "--algorithm.overlong-penalty",
        "{from_tokens = 512, to_tokens = 600}",
        "--sampling.max-tokens=9",
    ]
    begin = [*words(tmp_path), "--algorithm.loss", "sapo", "--algorithm.aggregation", "token", *penalty]
    assert main([*begin, "--optimizer", "sgd", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    told = (
        "# left out below, and used:\n#   algorithm.tau_positive = 1.0\n#   algorithm.tau_negative = 1.05\n"
    )
    assert f"\n\n{told}#   momentum = 0.9\n\nmodel = " in out
    run = validate(RunConfig, tomllib.loads(out))
    assert (run.algorithm.tau_positive, run.momentum) == (None, None)
    assert "overlong_penalty.from_tokens = 512 is not below sampling.max_tokens = 9" in err
    assert (
        main([*words(tmp_path), "--algorithm.preset", "dapo", "--algorithm.max-resample", "3", "--dry-run"])
        == 0
    )
    assert "left out" not in capsys.readouterr().out


def test_a_fine_tuning_is_shown_whole_as_a_file(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def accepts(specs: object) -> None:
        """The trainer's configuration is good."""

    monkeypatch.setattr(command, "check", accepts)
    data = written(tmp_path, {"messages": CHAT}, {"messages": CHAT}, {"messages": CHAT})
    run = ["sft", "--model", str(chat_model), "--data", str(data), "--batch-size", "2", "--optimizer", "muon"]
    assert main([*run, "--dry-run"]) == 0
    out = capsys.readouterr().out
    counted, _, rest = out.partition("\n\n")
    assert counted.startswith("# 3 chats, ") and counted.endswith("; 2 steps")
    used = "#   momentum = 0.95\n#   adamw_learning_rate = 1e-05\n#   max_steps = 2\n"
    assert rest.startswith(f"# left out below, and used:\n{used}\nmodel = ")
    config = validate(SftConfig, tomllib.loads(out))
    assert (config.data, config.batch_size, config.momentum, config.max_steps) == (data, 2, None, None)
    assert config.lr_scheduler == "cosine", "which was not said"
    assert main([*run, "--max-steps", "5", "--dry-run"]) == 0
    assert "#   max_steps" not in capsys.readouterr().out


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
