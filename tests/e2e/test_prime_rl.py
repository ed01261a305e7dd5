"""A file of prime-rl, as its examples write it, trains: four processes, a real environment, its own loss."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.conftest import summary_of
from tests.e2e.conftest import quartet
from tests.e2e.foreign_files import STEPS, evaluations_of, steps_of, trained

pytestmark = pytest.mark.usefixtures("imported_once")

FILE = """
max_steps = 20
seq_len = 128
output_dir = "{output}"

[deployment]
num_train_gpus = 1
num_infer_gpus = 1

[weight_broadcast]
type = "nccl"

[model]
name = "{model}"

[trainer.optim]
lr = 1e-3

[trainer.loss]
dppo_mask_high = 0.3

[ckpt]
interval = 2

[orchestrator]
batch_size = 64
group_size = 8

[orchestrator.train.sampling]
max_completion_tokens = 13

[[orchestrator.train.source]]
name = "reverse"
env.taskset.id = "reverse-text"
env.taskset.max_chars = 6
env.agent.harness.id = "null"
env.agent.runtime.type = "subprocess"

[orchestrator.eval]
interval = 100
num_examples = 16

[orchestrator.eval.sampling]
max_completion_tokens = 3
temperature = 0.0

[[orchestrator.eval.source]]
env.taskset.id = "reverse-text"
env.taskset.max_chars = 6

[inference]
"""


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Output folder of one short run, and what was said of its file."""
    return trained(tmp_path_factory.mktemp("prime-rl"), FILE, tiny_model)


def test_a_file_of_prime_rl_trains(finished: tuple[Path, str]) -> None:
    output, said = finished
    assert "read as prime-rl" in said and 'weight_broadcast = {"type": "nccl"} (weights travel over' in said
    summary = summary_of(output)
    assert (summary["phase"], summary["steps"]) == ("completed", STEPS)
    assert summary["ledger"]["trained"] == STEPS * 64
    assert summary["max_off_policy_steps_seen"] <= 1
    assert summary["reward_before"] is not None and summary["reward_after"] is None, (
        "at no step of its interval"
    )
    steps = steps_of(output)
    assert len(steps) == STEPS and {row["train/learning_rate"] for row in steps} == {1e-3}
    assert all(0 < row["env/reverse/reward"] <= 1 for row in steps)
    # One character is one token, and then there is the end: evaluations have shorter answers than training.
    (measured,) = evaluations_of(output)
    assert 0 < measured["eval/mean_length"] <= 3 < min(row["rollout/mean_length"] for row in steps)
    run = tomllib.loads((output / "run.toml").read_text())
    assert (run["weight_decay"], run["algorithm"]["custom_args"]["mask_high"]) == (0.01, 0.3)


def test_its_loss_is_its_own_on_the_rollouts_that_teach(finished: tuple[Path, str]) -> None:
    for row in steps_of(finished[0]):
        assert 0 <= row["train/masked_fraction"] < 0.5
        assert 0 < row["train/loss_tokens"] <= row["train/tokens"]


def test_what_dry_run_shows_can_be_kept(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(FILE.format(model=tiny_model, output=tmp_path / "run"))
    done = quartet("rl", "@", file, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = tmp_path / "mine.toml"
    kept.write_text(done.stdout)
    assert tomllib.loads(done.stdout)["learning_rate"] == 1e-3
    again = quartet("rl", "@", kept, "--dry-run")
    assert again.returncode == 0 and "read as" not in again.stderr, again.stdout + again.stderr
