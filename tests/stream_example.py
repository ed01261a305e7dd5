"""examples/stream_rollouts as its README runs it: `quartet rl` without a trainer, and what trains instead.

What that program printed is the record of what it trained.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import QUARTET, REPOSITORY

RUN = "foreign"
EXAMPLE = REPOSITORY / "examples/stream_rollouts"
SERVERS = ("orchestrator", "inference")


def launch(model: Path, output: Path, steps: int) -> list[str]:
    """The command that starts all but the trainer, on ports of their own."""
    command = [*QUARTET, "rl", "@", str(EXAMPLE / "run.toml"), "--model", str(model), "--plain"]
    command += ["--run-id", RUN, "--output-dir", str(output), "--max-steps", str(steps)]
    return command + [f"--{name}.server.address=127.0.0.1:0" for name in SERVERS]


def addresses(output: Path) -> dict[str, str]:
    """Where they listen; empty until all of them do."""
    ports = {name: output / "data" / f"{name}.port" for name in SERVERS}
    if not all(port.exists() for port in ports.values()):
        return {}
    return {name: port.read_text().strip() for name, port in ports.items()}


def train(model: Path, state: Path, served: dict[str, str]) -> list[str]:
    """The command of the program, whose disk is `state`."""
    command = [sys.executable, str(EXAMPLE / "train.py"), "--model", str(model), "--state", str(state)]
    return command + [word for name, address in served.items() for word in (f"--{name}", address)]


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process, killed in the end; what it prints is added to the file."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("a") as out:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, text=True, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def steps_in(log: Path) -> list[int]:
    """The steps that were trained; the last line may be under way."""
    return [int(step) for step in re.findall(r"^step (\d+)  loss.*\n", log.read_text(), re.MULTILINE)]


def wait_until(condition: Callable[[], object], *processes: subprocess.Popen[str], seconds: float) -> None:
    """Returns once the condition holds; a process that ends before is the test's end."""
    deadline = time.monotonic() + seconds
    while not condition():
        ended = [process.args for process in processes if process.poll() is not None]
        assert not ended, f"ended too soon: {ended}"
        assert time.monotonic() < deadline, f"nothing happened within {seconds} s"
        time.sleep(0.02)
