"""Invariant 9: SIGKILL of each service once during the job. The run ends as if nothing had happened.

Three parts, as in etcd's robustness tests: traffic (the main job, shortened), a nemesis (SIGKILL at a seeded
moment; the seed is printed), and a checker over what the run recorded: as many steps, a balanced ledger. What
the orchestrator says of itself is held against the trainer's own account of the calls that it applied.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QUARTET, summary_of, under_way

SERVICES = ("trainer", "inference", "envhost", "orchestrator")
#: The process that trainer and inference are forks of, and die with.
FORK_SERVER = "forkserver"
#: Without these nothing is sampled: what was before is trained on for a while, as if nothing had happened.
SAMPLING = ("inference", FORK_SERVER)
STEPS, BATCH_SIZE = 30, 64
SAVED_EVERY = 5  # steps: ckpt.interval of the main job
FIRST_STEP_SECONDS = 120
RUN_SECONDS = 400
NEXT_STEP_SECONDS = 15.0  # the promise of the design: the next step within 15 s of a kill
LOADED = 2.0  # a shared machine under test load starts processes this many times slower


def children(parent: int) -> Iterator[tuple[int, str]]:
    """Direct children of a process, and those of its fork server, with their command lines."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == parent:
                line = (entry / "cmdline").read_text().replace("\0", " ")
                yield int(entry.name), line
                if f"quartet.local.{FORK_SERVER}" in line:
                    yield from children(int(entry.name))


def pid_of(launcher: int, service: str) -> int | None:
    module = f"-m quartet.local.{service}" if service == FORK_SERVER else f"-m quartet_{service}"
    return next((pid for pid, line in children(launcher) if module in line), None)


def recorded(output: Path) -> list[dict[str, Any]]:
    """What the run has recorded of its steps so far."""
    metrics = output / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if '"train/loss"' in line and line.endswith("\n")]


def steps_done(output: Path) -> int:
    """Steps that the run has recorded so far."""
    return len(recorded(output))


def wait_for_version(process: subprocess.Popen[str], output: Path, version: int, seconds: float) -> float:
    """Seconds until the run has recorded a step with no token of an earlier version."""
    started = time.monotonic()
    done = version  # the step after so many is the first that can be
    while True:
        left = seconds - (time.monotonic() - started)
        wait_for_steps(process, output, done + 1, left)
        if any(row["step"] - 1 - row["staleness/max"] >= version for row in recorded(output)):
            return time.monotonic() - started
        done = steps_done(output)


def saved_by_trainer(output: Path) -> dict[str, Any]:
    """The last state of a run as the trainer wrote it, on its own disk: the calls and optimizer steps that it
    applied. (GetRun says the same of a run that is open; a completed one is closed.)"""
    (final,) = (output / "data/trainer/run").glob("final@*/run.json")
    loaded: dict[str, Any] = json.loads(final.read_text())
    return loaded


def wait_for_steps(process: subprocess.Popen[str], output: Path, steps: int, seconds: float) -> float:
    """Seconds until the run has recorded so many steps."""
    started = time.monotonic()
    while steps_done(output) < steps:
        assert process.poll() is None, f"the launcher ended with {process.returncode}"
        assert time.monotonic() - started < seconds, f"no step {steps} within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - started


@pytest.mark.timeout(RUN_SECONDS + 60)
def test_invariant_9_kill_each_service_once(
    tiny_model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seed = int(os.environ.get("QUARTET_FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"QUARTET_FAULT_SEED={seed}")
    chance = random.Random(seed)
    output = tmp_path / "run"
    command = [*QUARTET, "rl", "@", "configs/reverse-text.toml", "--model", str(tiny_model)]
    command += ["--max-steps", str(STEPS), "--batch-size", str(BATCH_SIZE), "--eval.num-examples", "32"]
    command += ["--ckpt.interval", str(SAVED_EVERY), "--output-dir", str(output)]
    recoveries: dict[str, float] = {}
    with under_way(command, tmp_path / "launcher.log") as process:
        wait_for_steps(process, output, 2, FIRST_STEP_SECONDS)
        # Beside a GPU there is none.
        victims = [*SERVICES, *([FORK_SERVER] if pid_of(process.pid, FORK_SERVER) else [])]
        for service in chance.sample(victims, len(victims)):
            # Anywhere in a step: on a fast machine several would pass within a second.
            step_s = statistics.median(row["time/step_s"] for row in recorded(output))
            time.sleep(chance.uniform(0.0, min(step_s, 1.0)))
            pid = pid_of(process.pid, service)
            assert pid is not None, f"{service} is not a child of the launcher"
            before = steps_done(output)
            assert before <= STEPS - 4, "the run ended before every service was killed; raise STEPS"
            os.kill(pid, signal.SIGKILL)
            bound = NEXT_STEP_SECONDS * LOADED * 2
            if service in SAMPLING:
                # Rollouts of two steps may have been there, and `before + 1` may be published already.
                seconds = wait_for_version(process, output, before + 2, bound)
            else:
                # A step may have been on its way at the kill: recovery is seen at the second one after it.
                seconds = wait_for_steps(process, output, min(before + 2, STEPS), bound)
            recoveries[service] = seconds
            record_property(service, seconds)  # benchmarks/recovery.py reads it
        assert process.wait(timeout=RUN_SECONDS) == 0
    print("seconds to the step that shows that all is well again:", recoveries)
    summary = summary_of(output)
    ledger = summary["ledger"]
    assert summary["steps"] == STEPS
    assert ledger["trained"] == STEPS * BATCH_SIZE, "each step trained one whole batch, once"
    assert ledger["dispatched"] == ledger["trained"] + sum(ledger["discarded"].values()) + ledger["in_flight"]
    assert ledger["in_flight"] == 0
    assert summary["max_off_policy_steps_seen"] <= 1
    rows = recorded(output)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "every step once, in order"
    skipped = [row["train/logprob_tokens_skipped"] for row in rows]
    assert skipped == [0] * STEPS, "a trainer that came back verifies the tokens of older versions, too"
    saved = saved_by_trainer(output)
    # Version 0; of each step a batch, an optimizer step, a version; states, of which one is after the last.
    calls = 1 + 3 * STEPS + STEPS // SAVED_EVERY
    assert saved["applied_seq_id"] == calls, "each call of the run's list, once"
    assert (saved["policy_version"], saved["published_version"], saved["skipped_steps"]) == (STEPS, STEPS, 0)
