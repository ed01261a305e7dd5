"""examples/reward_service as its README runs it: a program that serves prompts and rewards by plain gRPC,
killed and started again while a run is trained on them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import QUARTET, REPOSITORY, summary_of
from tests.stream_example import running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("imported_once")]

SECONDS = 300  # a loaded machine takes many times the usual 15 s
STEPS = 8
EXAMPLE = REPOSITORY / "examples/reward_service"


@pytest.mark.timeout(4 * SECONDS)  # the model is made within it, too
def test_a_service_that_is_killed_on_the_way_costs_the_run_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """Invariant 9, for whoever serves RewardService."""
    output, log, served = tmp_path / "run", tmp_path / "rl.log", tmp_path / "served.log"
    address = f"unix:{tmp_path}/rewards.sock"
    serve = [sys.executable, str(EXAMPLE / "server.py"), "--address", address]
    launch = [*QUARTET, "rl", "@", str(EXAMPLE / "run.toml"), "--model", str(tiny_model), "--plain"]
    launch += ["--env.0.args.address", address, "--output-dir", str(output), "--max-steps", str(STEPS)]
    with running(serve, served) as first:
        wait_until(served.read_text, first, seconds=SECONDS)
        with running(launch, log) as launcher:
            wait_until(lambda: "step 3/" in log.read_text(), first, launcher, seconds=SECONDS)
            first.kill()
            first.wait()
            with running(serve, served):
                assert launcher.wait(SECONDS) == 0, log.read_text()
    summary = summary_of(output)
    assert summary["phase"] == "completed" and summary["steps"] == STEPS
    ledger = summary["ledger"]
    assert ledger["trained"] == ledger["dispatched"] == STEPS * 128 and not ledger["discarded"]
    assert summary["reward_after"] > summary["reward_before"]
    trained = [row for row in map(json.loads, (output / "metrics.jsonl").open()) if "train/loss" in row]
    assert len(trained) == STEPS and all("metrics/exact" in row for row in trained), (
        "of weight 0, it is shown"
    )
