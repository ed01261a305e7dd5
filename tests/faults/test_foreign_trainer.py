"""Invariants 2 and 9 for a run whose trainer is somebody else's: SIGKILL of it and of each service around it.

The program of examples/stream_rollouts trains; what it printed is the record: no step twice, in order.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import QUARTET, REPOSITORY
from tests.faults.test_kill_each_service import pid_of

EXAMPLE = REPOSITORY / "examples/stream_rollouts"
VICTIMS = ("trainer", "inference", "envhost", "orchestrator")
STEPS = 12
# On a machine under test load; the replica is told the weights again after some seconds of silence.
STEP_SECONDS, RUN_SECONDS = 120, 400


@pytest.mark.timeout(RUN_SECONDS + 200)
def test_every_step_is_trained_once_whoever_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("QUARTET_FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"QUARTET_FAULT_SEED={seed}")
    chance = random.Random(seed)
    output, printed = tmp_path / "run", tmp_path / "train.log"
    launch = [*QUARTET, "rl", "@", str(EXAMPLE / "run.toml"), "--model", str(tiny_model), "--plain"]
    launch += ["--run-id", "foreign", "--output-dir", str(output), "--max-steps", str(STEPS)]
    launch += [f"--{name}.server.address=127.0.0.1:0" for name in ("orchestrator", "inference")]
    with ExitStack() as running:
        launcher = begin(running, launch, tmp_path / "launcher.log")
        ports = [output / "data" / f"{name}.port" for name in ("orchestrator", "inference")]
        wait_until(lambda: all(port.exists() for port in ports), launcher)
        orchestrator, inference = (port.read_text().strip() for port in ports)
        train = [sys.executable, str(EXAMPLE / "train.py"), "--model", str(tiny_model)]
        train += ["--state", str(tmp_path / "state.pt")]
        train += ["--orchestrator", orchestrator, "--inference", inference]
        trainer = begin(running, train, printed)
        wait_until(lambda: len(steps_in(printed)) >= 1, launcher)
        for victim in chance.sample(VICTIMS, len(VICTIMS)):
            before = len(steps_in(printed))
            assert before < STEPS - 1, "the run ended before everybody was killed; raise STEPS"
            time.sleep(chance.uniform(0.0, 1.0))
            if victim == "trainer":
                trainer.kill()
                trainer.wait()
                trainer = begin(running, train, printed)
            else:
                pid = pid_of(launcher.pid, victim)
                assert pid is not None, f"{victim} is not a child of the launcher"
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: len(steps_in(printed)) >= min(before + 2, STEPS), launcher)  # noqa: B023 - called at once
        assert trainer.wait(RUN_SECONDS) == 0, printed.read_text()[-4000:]
        assert launcher.wait(RUN_SECONDS) == 0, (tmp_path / "launcher.log").read_text()[-4000:]
    # One may have been on the disk and not printed when the trainer was killed; none is there twice.
    told = steps_in(printed)
    assert told == sorted(set(told)) and len(told) >= STEPS - 1 and told[-1] == STEPS
    summary = json.loads((output / "summary.json").read_text())
    ledger = summary["ledger"]
    assert summary["steps"] == STEPS and ledger["trained"] == STEPS * 64 and ledger["in_flight"] == 0
    assert ledger["dispatched"] == ledger["trained"] + sum(ledger["discarded"].values())
    assert summary["max_off_policy_steps_seen"] <= 1


def begin(running: ExitStack, command: list[str], log: Path) -> subprocess.Popen[str]:
    """A process that ends with the test; what it prints is added to the file."""
    out = running.enter_context(log.open("a"))
    process = subprocess.Popen(command, cwd=REPOSITORY, text=True, stdout=out, stderr=subprocess.STDOUT)
    running.callback(process.wait)
    running.callback(process.kill)
    return process


def steps_in(log: Path) -> list[int]:
    """What the trainer printed; the last line may be under way."""
    return [int(step) for step in re.findall(r"^step (\d+)  loss.*\n", log.read_text(), re.MULTILINE)]


def wait_until(condition: Callable[[], bool], launcher: subprocess.Popen[str]) -> None:
    started = time.monotonic()
    while not condition():
        assert launcher.poll() is None, f"the launcher ended with {launcher.returncode}"
        assert time.monotonic() - started < STEP_SECONDS, f"nothing happened within {STEP_SECONDS} s"
        time.sleep(0.05)
