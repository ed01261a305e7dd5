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
from quartet.local.supervisor import State, Status
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
