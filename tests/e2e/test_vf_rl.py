"""A file of vf-rl, as its documents write it, trains: four real processes, a real environment, an adapter."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QUARTET, REPOSITORY, summary_of

STEPS = 3
RUN_SECONDS = 280

FILE = """
model = "{model}"

[env]
id = "primeintellect/reverse-text"

[env.args]
max_chars = 6

[inference]
gpus = 1

[inference.args]
enable_auto_tool_choice = true
tool_call_parser = "hermes"

[trainer]
gpus = 1

[trainer.args]
run_name = "reverse-text"
output_dir = "{output}"
micro_batch_size = 4
rollouts_per_example = 8
batch_size = 64
max_steps = 500
max_tokens = 13
max_seq_len = 64
learning_rate = 2e-3
save_steps = 2
"""


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Output folder of one short run, and what was said of its file."""
    folder = tmp_path_factory.mktemp("vf-rl")
    file, output = folder / "reverse-text.toml", folder / "run"
    file.write_text(FILE.format(model=tiny_model, output=output))
    # The engine by name: one that is installed beside would take its minutes to start.
    command = [*QUARTET, "rl", "@", str(file), "--max_steps", str(STEPS), "--inference.engine", "embedded"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stderr


def steps_of(output: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def test_a_file_of_vf_rl_trains(finished: tuple[Path, str]) -> None:
    output, said = finished
    assert "read as vf-rl" in said and "without effect here: inference.args.enable_auto_tool_choice" in said
    summary = summary_of(output)
    assert (summary["phase"], summary["steps"]) == ("completed", STEPS)
    assert summary["ledger"]["trained"] == STEPS * 64
    assert summary["max_off_policy_steps_seen"] <= 1
    steps = steps_of(output)
    assert len(steps) == STEPS
    assert {row["train/learning_rate"] for row in steps} == {2e-3}
    # The environment was found without its owner, and is told as the file calls it.
    assert all(0 < row["env/primeintellect/reverse-text/reward"] <= 1 for row in steps)


def test_its_loss_is_the_masked_ratio(finished: tuple[Path, str]) -> None:
    """Against the policy itself the ratio is 1 in every bit; the weight is what the sampler is apart by."""
    for row in steps_of(finished[0]):
        assert row["train/ratio_max"] == row["train/ratio_mean"] == 1
        assert row["train/clipped_fraction"] == 0
        assert row["train/correction_mean"] > 0
        assert 0 <= row["train/correction_bounded_fraction"] < 0.5


def test_its_adapter_is_there_at_the_end(finished: tuple[Path, str]) -> None:
    adapter = json.loads((finished[0] / "checkpoint" / "adapter" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (8, 32)
    assert len(adapter["target_modules"]) == 7
