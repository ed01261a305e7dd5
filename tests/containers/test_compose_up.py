"""`docker compose up`, by a real engine: images are built, the whole job runs, every service is killed in it.

`make test-compose` runs it. It takes minutes and builds images, so nothing else does. What it makes has names
of its own, and is removed at the end; the images stay, as after any build.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SERVICES = ("trainer", "orchestrator", "inference", "envhost")
BUILD_SECONDS, MODEL_SECONDS, STEP_SECONDS, END_SECONDS = 3600, 900, 180, 900
#: A killed container starts again by its restart policy, imports torch and catches up.
BACK_SECONDS = 120
#: All but the first process and the shell itself: the service.
KILL = "kill -9 -1"

pytestmark = [
    pytest.mark.skipif(
        "QUARTET_COMPOSE" not in os.environ, reason="builds images and runs containers: make test-compose"
    ),
    pytest.mark.timeout(BUILD_SECONDS + MODEL_SECONDS + END_SECONDS),
]


class Project:
    """A compose project with containers, network and volumes of its own."""

    def __init__(self) -> None:
        self.name = f"quartet-test-{secrets.token_hex(4)}"

    def compose(self, *arguments: str, seconds: float = 120) -> str:
        """What the command prints on stdout; it has to end with 0."""
        done = self.attempt(*arguments, seconds=seconds)
        assert done.returncode == 0, f"docker compose {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def attempt(self, *arguments: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """A command that may fail."""
        command = ["docker", "compose", "-p", self.name, *arguments]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=seconds)

    def printed(self) -> str:
        """What the job has printed so far."""
        return self.compose("logs", "--no-log-prefix", "--no-color", "run").replace("\x1b[2K", "")

    def steps(self) -> list[int]:
        """The steps that it has told, in its order."""
        return [int(step) for step in re.findall(r" step (\d+)/50 ", self.printed())]

    def until_step(self, step: int, seconds: float) -> None:
        """Wait for it."""
        end = time.monotonic() + seconds
        while step > max(self.steps(), default=0):
            assert time.monotonic() < end, f"no step {step} within {seconds} s:\n{self.printed()}"
            time.sleep(0.5)

    def ended(self, service: str) -> str:
        """How its container ended, or that it has not."""
        end, state = time.monotonic() + STEP_SECONDS, ""
        while not state.startswith("exited") and time.monotonic() < end:
            time.sleep(0.5)
            state = self.compose("ps", "-a", "--format", "{{.State}} {{.ExitCode}}", service).strip()
        return state

    def started(self, service: str) -> int:
        """How often its container was started again after it ended."""
        container = self.compose("ps", "-a", "-q", service).strip()
        inspect = ["docker", "inspect", "--format", "{{.RestartCount}}", container]
        return int(subprocess.run(inspect, check=True, capture_output=True, text=True, timeout=60).stdout)

    def healthy(self, service: str) -> bool:
        """Whether its container says so."""
        said = self.compose("ps", "-a", "--format", "{{.Health}}", service)
        return said.strip() == "healthy"


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    """The deployment, as it is started by hand; the model is made by it."""
    project = Project()
    try:
        project.compose("build", seconds=BUILD_SECONDS)
        project.compose("up", "-d", seconds=MODEL_SECONDS)
        yield project
    finally:
        project.attempt("down", "-v", seconds=300)


def test_the_job_runs_and_outlives_every_service(project: Project) -> None:
    for number, service in enumerate(SERVICES):
        project.until_step(4 + 4 * number, STEP_SECONDS)
        before = project.started(service)
        project.attempt("exec", "-T", service, "sh", "-c", KILL)
        end = time.monotonic() + BACK_SECONDS
        # What it said of its health before it was killed stands for a moment.
        while project.started(service) == before or not project.healthy(service):
            assert time.monotonic() < end, f"{service} did not come back:\n{project.compose('ps', '-a')}"
            time.sleep(0.5)
    project.until_step(50, END_SECONDS)
    state = project.ended("run")
    printed = project.printed()
    assert state == "exited 0", printed
    assert project.steps() == list(range(1, 51)), "every step once, in order"
    untrained, trained = (
        float(reward) for reward in re.findall(r"after \d+ steps: reward ([\d.]+)", printed)
    )
    assert trained > untrained + 0.3, printed


def test_nothing_from_outside_reaches_it_and_it_reaches_nothing(project: Project) -> None:
    listening = project.compose("ps", "--format", "{{.Ports}}")
    assert "->" not in listening, "a published port"
    for service in SERVICES:
        routes = project.compose("exec", "-T", service, "cat", "/proc/net/route").splitlines()[1:]
        assert routes and "00000000" not in [route.split()[1] for route in routes], "a way out"
        owner = project.compose("exec", "-T", service, "id", "-u").strip()
        assert owner == "10001"
        written = project.attempt("exec", "-T", service, "touch", "/here")
        assert written.returncode != 0 and "Read-only" in written.stderr


def test_the_services_end_in_order(project: Project) -> None:
    began = time.monotonic()
    project.compose("stop", *SERVICES)
    assert time.monotonic() - began < 60
    codes = project.compose("ps", "-a", "--format", "{{.Service}} {{.ExitCode}}").splitlines()
    assert {f"{service} 0" for service in SERVICES} <= set(codes)
