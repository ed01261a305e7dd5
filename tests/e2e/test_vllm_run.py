"""A whole run whose replica is vLLM: trained, updated in flight, killed, and every token verified.

It is for the lane of vLLM alone, whose interpreter it is given; by hand, where the CPU has AVX2:

    make install-vllm models/tiny/config.json
    QUARTET_VLLM_PYTHON=.venv-vllm/bin/python .venv/bin/python -m pytest -s tests/e2e/test_vllm_run.py
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import QUARTET, REPOSITORY, summary_of, under_way
from tests.faults.test_kill_each_service import pid_of, saved_by_trainer, wait_for_steps

PYTHON = os.environ.get("QUARTET_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="QUARTET_VLLM_PYTHON names no interpreter (make test-vllm does)"),
    pytest.mark.usefixtures("imported_once"),
]

STEPS, BATCH_SIZE = 4, 16
START_SECONDS = 240  # vLLM alone takes 20 s where the machine does nothing else
RUN_SECONDS = 400
#: Largest |log-probability of vLLM - that of the trainer| in float32, as its conformance has it.
TOLERANCE = 5e-5


@pytest.mark.timeout(START_SECONDS + RUN_SECONDS + 60)
def test_invariants_3_and_9_of_a_run_with_vllm(tiny_model: Path, tmp_path: Path) -> None:
    """Each batch is of the version before it alone, so those after the kill are of the second process."""
    output = tmp_path / "run"
    command = [*QUARTET, "rl", "@", "configs/reverse-text.toml", "--model", str(tiny_model)]
    command += ["--inference.engine", "vllm", "--inference.python", str(REPOSITORY / PYTHON)]
    command += ["--max-off-policy-steps", "0", "--batch-size", str(BATCH_SIZE), "--max-steps", str(STEPS)]
    command += ["--sampling.seed", "7", "--eval.num-examples", "8", "--output-dir", str(output)]
    with under_way(command, tmp_path / "launcher.log") as process:
        wait_for_steps(process, output, 1, START_SECONDS)
        killed = pid_of(process.pid, "inference")
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        seconds = wait_for_steps(process, output, STEPS, RUN_SECONDS)
        assert pid_of(process.pid, "inference") not in (killed, None)
        assert process.wait(timeout=RUN_SECONDS) == 0
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1)), "every step once, in order"
    assert [row["staleness/max"] for row in steps] == [0] * STEPS
    differences = [row["train/logprob_difference_max"] for row in steps]
    print(f"{seconds:.1f} s from the kill to the last step; trainer and vLLM differ by {differences}")
    assert all(0 < one <= TOLERANCE for one in differences)
    assert [row["train/logprob_tokens_skipped"] for row in steps] == [0] * STEPS
    summary = summary_of(output)
    assert (summary["phase"], summary["steps"]) == ("completed", STEPS)
    assert summary["ledger"]["trained"] == STEPS * BATCH_SIZE and summary["ledger"]["in_flight"] == 0
    saved = saved_by_trainer(output)
    assert (saved["policy_version"], saved["published_version"], saved["skipped_steps"]) == (STEPS, STEPS, 0)
