"""A file of vf-rl, as its documents write it, trains: four real processes, a real environment, an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import summary_of
from tests.e2e.foreign_files import STEPS, steps_of, trained

pytestmark = pytest.mark.usefixtures("imported_once")

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
    return trained(tmp_path_factory.mktemp("vf-rl"), FILE, tiny_model)


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
