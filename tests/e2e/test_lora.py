"""The main job by an adapter, shortened: a base model that stays, an adapter that moves over the wire.

Invariants 3 (a version never lies) and 4 (bounded staleness) are read off a finished run.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import QUARTET, REPOSITORY, summary_of

pytestmark = pytest.mark.usefixtures("imported_once")

STEPS = 10
RUN_SECONDS = 280


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of one short run."""
    output = tmp_path_factory.mktemp("lora") / "run"
    command = [*QUARTET, "rl", "@", "configs/reverse-text-lora.toml", "--model", str(tiny_model)]
    command += ["--max-steps", str(STEPS), "--output-dir", str(output), "--eval.num-examples", "64"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def test_an_adapter_learns_too(finished: Path) -> None:
    summary = summary_of(finished)
    assert summary["steps"] == STEPS
    assert summary["reward_after"] >= summary["reward_before"] + 0.1
    assert summary["max_off_policy_steps_seen"] == 1


def test_invariant_3_trainer_and_engine_agree_on_every_token_of_an_adapter(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == STEPS
    assert max(row["train/logprob_difference_max"] for row in steps) <= 2e-5
    assert all(row["train/logprob_tokens_skipped"] == 0 for row in steps)
    assert all(row["train/logprob_tokens_compared"] == row["train/loss_tokens"] for row in steps)


def test_the_checkpoint_is_merged_and_has_the_adapter(finished: Path, tiny_model: Path) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(finished / "checkpoint")(ids).logits
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        plain = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, finished / "checkpoint" / "adapter").eval()(ids).logits
    torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-4)
    assert float((merged - plain).abs().max()) > 0.1
