"""A completed run with more steps, through the real services: bit for bit the run that had them all along, in
which services were killed meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import QUARTET, REPOSITORY, summary_of, under_way
from tests.faults.test_kill_each_service import wait_for_steps
from tests.faults.test_launcher import services_of

pytestmark = pytest.mark.usefixtures("imported_once")

RUN_SECONDS = 300
STEPS, ALL_STEPS = 3, 5
#: What no clock is part of.
OF_CLOCKS = ("event", "time", "time/", "tokens_per_second", "rollout/generation_time")
#: What is killed after each of the first steps.
KILLED = ("inference", "trainer", "orchestrator", "envhost")


def command_of(model: Path, output: Path, steps: int, *more: str) -> list[str]:
    """Saved is also between the ends; tokens are seeded."""
    command = [*QUARTET, "rl", "@", "configs/reverse-text.toml", "--model", str(model), "--plain"]
    command += ["--max-off-policy-steps", "0", "--sampling.seed", "7", "--eval.num-examples", "8"]
    command += ["--batch-size", "16"]
    return [*command, "--ckpt.interval", "2", "--max-steps", str(steps), "--output-dir", str(output), *more]


def launched(model: Path, output: Path, steps: int, *more: str) -> str:
    """What it printed."""
    command = command_of(model, output, steps, *more)
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launched_and_hurt(model: Path, output: Path, steps: int, log: Path) -> None:
    """One of KILLED is after each step, whatever it is about to do."""
    with under_way(command_of(model, output, steps), log) as process:
        for done, service in enumerate(KILLED, 1):
            wait_for_steps(process, output, done, RUN_SECONDS)
            (pid,) = services_of(output, f"{service}.toml")
            os.kill(pid, signal.SIGKILL)
        assert process.wait(timeout=RUN_SECONDS) == 0


def steps_of(output: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if not key.startswith(OF_CLOCKS)}
        for row in rows
        if "train/loss" in row
    ]


@pytest.mark.timeout(900)
def test_an_extended_run_is_bit_for_bit_the_longer_one(tiny_model: Path, tmp_path: Path) -> None:
    """Invariant 9: nor do kills of services lose or double anything, by what came out of it."""
    extended, straight = tmp_path / "extended", tmp_path / "straight"
    launched(tiny_model, extended, STEPS)
    first = steps_of(extended)
    assert len(first) == STEPS
    said = launched(tiny_model, extended, STEPS, "--resume")
    assert f"with max_steps above {STEPS} it goes on from here" in said
    said = launched(tiny_model, extended, ALL_STEPS, "--resume")
    assert f"goes on after step {STEPS} of {ALL_STEPS}" in said
    assert f"step {STEPS}/" not in said and said.count("completed") == 2, "the earlier part is not told again"
    launched_and_hurt(tiny_model, straight, ALL_STEPS, tmp_path / "launcher.log")
    assert steps_of(extended) == steps_of(straight) and steps_of(extended)[:STEPS] == first
    weights = [(folder / "checkpoint/model.safetensors").read_bytes() for folder in (extended, straight)]
    assert weights[0] == weights[1]
    one, other = summary_of(extended), summary_of(straight)
    assert one["ledger"] == other["ledger"] and one["reward_after"] == other["reward_after"]
    assert (one["phase"], one["steps"]) == ("completed", ALL_STEPS)
    assert f"max_steps = {ALL_STEPS}\n" in (extended / "run.toml").read_text()
