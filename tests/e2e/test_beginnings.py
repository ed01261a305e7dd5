"""Where a run begins: with an adapter that was fine-tuned; by the commands."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, summary_of
from tests.e2e.conftest import quartet

pytestmark = pytest.mark.usefixtures("imported_once")

#: A step and no evaluation: what is looked at is where it began.
OF_A_RUN = (
    *("--max-steps", "2", "--batch-size", "8", "--rollouts-per-example", "4", "--plain"),
    *("--max-off-policy-steps", "0", "--sampling.max-tokens", "8", "--eval.num-examples", "0"),
    *("--checks.verify-logprobs", "true", "--warmup-steps", "0"),
)
CHATS = [
    {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]}
    for text in ("abc", "hello", "wordle", "quartet")
]


@pytest.mark.timeout(900)
def test_a_run_begins_with_a_fine_tuned_adapter(random_model: Path, tmp_path: Path) -> None:
    """What [lora] leaves out is the adapter's; trainer and engine agree on every token from version 0 on."""
    data, tuned = tmp_path / "chats.jsonl", tmp_path / "sft"
    data.write_text("".join(json.dumps(one) + "\n" for one in CHATS))
    lora = ("--lora.enabled", "true", "--lora.r", "4", "--lora.alpha", "12")
    done = quartet(
        *("sft", "--model", random_model, "--data", data, "--max-steps", "3", "--batch-size", "4"),
        *("--learning-rate", "0.01", "--output-dir", tuned, *lora),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    begins = tuned / "checkpoint" / "adapter"
    run = ("rl", "@", "configs/reverse-text-lora.toml", "--model", random_model, *OF_A_RUN)
    done = quartet(*run, "--output-dir", tmp_path / "unfit", "--lora.initial-adapter", begins)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "lora.r = 8 is refused: the adapter in" in done.stderr and "has 4; set that" in done.stderr

    text = (REPOSITORY / "configs/reverse-text-lora.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("r =", "alpha =", "target_modules"))]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    run = ("rl", "@", tmp_path / "run.toml", "--model", random_model, *OF_A_RUN)
    output = tmp_path / "run"
    done = quartet(*run, "--output-dir", output, "--lora.initial-adapter", begins)
    assert done.returncode == 0, done.stdout + done.stderr
    written = tomllib.loads((output / "run.toml").read_text())["lora"]
    assert (written["r"], written["alpha"], written["initial_adapter"]) == (4, 12.0, str(begins))
    assert summary_of(output)["steps"] == 2
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert max(row["train/logprob_difference_max"] for row in steps) <= 2e-5
    assert all(row["train/logprob_tokens_skipped"] == 0 for row in steps)
