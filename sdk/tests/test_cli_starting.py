"""What is said of a run that has not begun."""

from __future__ import annotations

import asyncio
import io

import pytest
from quartet.cli import starting
from quartet.cli.display import Plain
from quartet.cli.live import LiveScreen
from quartet.cli.progress import Progress
from quartet.cli.starting import Start, tell_start
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service
from quartet.kit.server import start as serve
from quartet.local.supervisor import State, Status
from quartet.v1 import envhost_service_pb2 as pb
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceServicer
from quartet.v1.envhost_service_pb2_grpc import add_EnvHostServiceServicer_to_server as add_host
from quartet.v1.orchestrator_service_pb2 import RUN_PHASE_PENDING, Run
from rich.console import Console


class Screen(Plain):
    """The lines that are said."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.lines: list[str] = []
        self.spoke = asyncio.Event()

    def say(self, line: str) -> None:
        self.lines.append(line)
        self.spoke.set()

    async def next(self) -> str:
        """The line that is said now."""
        async with asyncio.timeout(60):
            await self.spoke.wait()
        self.spoke.clear()
        return self.lines[-1]


async def test_each_thing_that_a_start_waits_for_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "PATIENT_SECONDS", 0.01)
    monkeypatch.setattr(starting, "NEXT_SECONDS", 0.01)
    start, screen, turns = Start(), Screen(), 0
    trainer, inference = (Status(name, "127.0.0.1:1") for name in ("trainer", "inference"))
    envhost = Status("envhost", "127.0.0.1:1", State.UP, pid=9)

    def statuses() -> list[Status]:
        nonlocal turns
        turns += 1
        return [trainer, inference, envhost]

    task = asyncio.create_task(tell_start(statuses, start, screen))
    while turns < 5:  # noqa: ASYNC110 - before other machines are there, nothing was started
        await asyncio.sleep(0.01)
    assert screen.lines == []
    trainer.pid = inference.pid = 7
    assert await screen.next() == "waiting for trainer (starting), inference (starting)"
    trainer.state = State.UP
    inference.state, inference.why = State.BACKOFF, "out of memory"
    assert await screen.next() == "waiting for inference (restarting: out of memory)"
    inference.state = State.UP
    start.submitted.set()
    assert await screen.next() == (
        "waiting for the orchestrator, which checks the run: for that its environments are loaded"
    )
    before = turns
    while turns < before + 5:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert len(screen.lines) == 3, "what has not changed is not said again"
    start.accepted.set()
    async with asyncio.timeout(60):
        await task


class Host(EnvHostServiceServicer):  # type: ignore[misc]
    """Has loaded some of what it was asked for."""

    def __init__(self, *loaded: str) -> None:
        self.loaded = set(loaded)

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: object
    ) -> pb.ListEnvironmentsResponse:
        names = ("fast", "slow", "another", "of-nobody")
        infos = [pb.EnvironmentInfo(id=one, api="v1" if one in self.loaded else "") for one in names]
        return pb.ListEnvironmentsResponse(environments=infos)


async def test_environments_that_are_being_loaded_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as they are, by what all hosts say."""
    monkeypatch.setattr(starting, "PATIENT_SECONDS", 0.01)
    monkeypatch.setattr(starting, "NEXT_SECONDS", 0.01)
    hosts = [Host("fast"), Host("another")]
    servers = [
        await serve([Service("quartet.v1.EnvHostService", add_host, one)], ServerConfig(), Health())
        for one in hosts
    ]
    statuses = [
        Status(name, server.address, State.UP, pid=9)
        for name, server in zip(("envhost", "envhost-2"), servers, strict=True)
    ]
    # Hosts that cannot say, and a service that is none.
    statuses += [
        Status("envhost-3", "127.0.0.1:1", State.UP, pid=9),
        Status("envhost-4", "0.0.0.0:1", State.UP, pid=9),  # by the user's own door
        Status("trainer", "127.0.0.1:1", State.UP),
    ]
    start, screen = Start(), Screen()
    start.submitted.set()
    checks = "waiting for the orchestrator, which checks the run: for that its environments are loaded"
    order = ["slow", "fast", "another"]
    task = asyncio.create_task(tell_start(lambda: statuses, start, screen, order))
    try:
        assert await screen.next() == f"{checks} (not loaded yet: slow)"
        hosts[1].loaded.clear()
        assert await screen.next() == f"{checks} (not loaded yet: slow, another)"
        hosts[0].loaded.update(("slow", "another"))
        assert await screen.next() == checks
    finally:
        start.accepted.set()
        await task
        for server in servers:
            await server.stop(0)


async def test_a_start_that_is_soon_over_is_not_spoken_of() -> None:
    start, screen = Start(), Screen()
    task = asyncio.create_task(tell_start(lambda: [Status("trainer", "127.0.0.1:1", pid=7)], start, screen))
    start.accepted.set()
    async with asyncio.timeout(starting.PATIENT_SECONDS):
        await task
    assert screen.lines == []


def test_the_screen_of_a_run_that_has_not_begun_shows_no_phase_and_no_step_of_it() -> None:
    console = Console(width=120, file=io.StringIO())
    screen = LiveScreen(console)

    def figures(progress: Progress) -> str:
        console.print(screen.render(progress, []))
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    before = figures(Progress())
    assert "starting" in before and "unspecified" not in before and "of 0" not in before
    begun = figures(Progress(run=Run(phase=RUN_PHASE_PENDING, max_steps=7)))
    assert "pending" in begun and "0 of 7" in begun
    screen.close()
