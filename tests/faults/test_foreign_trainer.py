"""Invariants 2 and 9 for a run whose trainer is somebody else's: SIGKILL of it and of each service around it.

The program of examples/stream_rollouts trains; what it printed is the record: no step twice, in order.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import summary_of
from tests.faults.test_kill_each_service import pid_of
from tests.stream_example import addresses, launch, running, steps_in, train, wait_until

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
    with ExitStack() as processes:
        launcher = processes.enter_context(running(launch(tiny_model, output, STEPS), tmp_path / "rl.log"))
        wait_until(lambda: addresses(output), launcher, seconds=STEP_SECONDS)
        program = train(tiny_model, tmp_path / "state.pt", addresses(output))
        trainer = processes.enter_context(running(program, printed))
        wait_until(lambda: steps_in(printed), launcher, seconds=STEP_SECONDS)
        for victim in chance.sample(VICTIMS, len(VICTIMS)):
            before = len(steps_in(printed))
            assert before < STEPS - 1, "the run ended before everybody was killed; raise STEPS"
            time.sleep(chance.uniform(0.0, 1.0))
            if victim == "trainer":
                trainer.kill()
                trainer.wait()
                trainer = processes.enter_context(running(program, printed))
            else:
                pid = pid_of(launcher.pid, victim)
                assert pid is not None, f"{victim} is not a child of the launcher"
                os.kill(pid, signal.SIGKILL)
            wanted = min(before + 2, STEPS)
            wait_until(lambda: len(steps_in(printed)) >= wanted, launcher, seconds=STEP_SECONDS)  # noqa: B023 - at once
        assert trainer.wait(RUN_SECONDS) == 0, printed.read_text()[-4000:]
        assert launcher.wait(RUN_SECONDS) == 0, (tmp_path / "rl.log").read_text()[-4000:]
    # One may have been on the disk and not printed when the trainer was killed; none is there twice.
    told = steps_in(printed)
    assert told == sorted(set(told)) and len(told) >= STEPS - 1 and told[-1] == STEPS
    summary = summary_of(output)
    ledger = summary["ledger"]
    assert summary["steps"] == STEPS and ledger["trained"] == STEPS * 64 and ledger["in_flight"] == 0
    assert ledger["dispatched"] == ledger["trained"] + sum(ledger["discarded"].values())
    assert summary["max_off_policy_steps_seen"] <= 1
