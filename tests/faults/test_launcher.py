"""Invariant 9 for the launcher: killed, interrupted twice, gone on with, the run ends as if nothing had been.

No process outlives the launcher, however it ends; every step is recorded once; the ledger balances.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from quartet.cli.asked import ONE_WISH_SECONDS

from tests.conftest import QUARTET, REPOSITORY, summary_of
from tests.faults.test_kill_each_service import children, steps_done, wait_for_steps
from tests.forked_services import with_imports_of

STEPS, BATCH_SIZE = 16, 64
START_SECONDS = 180  # a machine under test load starts four services in a minute
RUN_SECONDS = 300
GONE_SECONDS = 9.0  # who is asked twice waits for no service to drain, which would be 10 s


def launch(
    model: Path, output: Path, log: Path, *more: str, environment: Mapping[str, str] = os.environ
) -> subprocess.Popen[str]:
    command = [*QUARTET, "rl", "@", "configs/reverse-text.toml", "--model", str(model)]
    command += ["--max-steps", str(STEPS), "--batch-size", str(BATCH_SIZE), "--eval.num-examples", "16"]
    command += ["--output-dir", str(output), *more]
    with log.open("a") as out:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True
        )


def services_of(output: Path, file: str = "") -> list[int]:
    """Processes that were started with this folder's configuration, or with this file of it."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
        except OSError:
            continue
        if f"{output}/config/{file}" in line:
            found.append(int(entry.name))
    return found


def wait_gone(output: Path, also: Sequence[int] = ()) -> None:
    """Until no service of the folder is left, nor the processes `also`."""
    deadline = time.monotonic() + GONE_SECONDS
    while left := services_of(output) + [pid for pid in also if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes {left} outlived the launcher"
        time.sleep(0.05)


def wait_heard(process: subprocess.Popen[str], log: Path) -> None:
    """Until the first signal is: what follows within ONE_WISH_SECONDS of that, and not of when it was sent,
    is the same wish."""
    deadline = time.monotonic() + GONE_SECONDS
    while "Ctrl-C again kills everything" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.timeout(900)
def test_invariant_9_the_launcher_is_killed_and_interrupted(
    tiny_model: Path, tmp_path: Path, importer: str
) -> None:
    seed = int(os.environ.get("QUARTET_FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"QUARTET_FAULT_SEED={seed}")
    chance = random.Random(seed)
    output, log = tmp_path / "run", tmp_path / "launcher.log"
    process = launch(tiny_model, output, log)
    try:
        wait_for_steps(process, output, 2, START_SECONDS)
        assert len(services_of(output)) >= 4
        time.sleep(chance.uniform(0.0, 1.0))
        started = [pid for pid, _ in children(process.pid)]
        process.kill()
        process.wait()
        wait_gone(output, started)

        before = steps_done(output)
        assert before < STEPS - 4, "the launcher was killed too late; raise STEPS"
        process = launch(tiny_model, output, log, "--resume")
        wait_for_steps(process, output, before + 2, START_SECONDS)
        process.send_signal(signal.SIGINT)
        wait_heard(process, log)
        time.sleep(ONE_WISH_SECONDS + chance.uniform(0.0, 0.2))
        began = time.monotonic()
        started = [pid for pid, _ in children(process.pid)]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=GONE_SECONDS) == 130
        assert time.monotonic() - began < GONE_SECONDS
        wait_gone(output, started)

        # What ends of itself; those that were killed were all as a user's are.
        environment = os.environ | with_imports_of(importer)
        process = launch(tiny_model, output, log, "--resume", environment=environment)
        assert process.wait(timeout=RUN_SECONDS) == 0
        wait_gone(output)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        print(log.read_text()[-6000:])
    summary = summary_of(output)
    ledger = summary["ledger"]
    assert summary["steps"] == STEPS and ledger["in_flight"] == 0
    assert ledger["trained"] == STEPS * BATCH_SIZE
    assert ledger["dispatched"] == ledger["trained"] + sum(ledger["discarded"].values())
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, STEPS + 1))
    assert not any(row.get("train/versions_changed") for row in rows), "replays are bit-equal"
    assert "go on with" in log.read_text()
