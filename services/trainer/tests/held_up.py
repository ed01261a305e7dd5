"""A method of a run that waits, so that a test can look at what happens meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from quartet_trainer.run import Run
from quartet_trainer.worker import Worker

WAIT_SECONDS = 60.0


def held_up(monkeypatch: pytest.MonkeyPatch, method: str) -> tuple[threading.Event, threading.Event]:
    """Events: the method was called; it may go on (set by the test, within `WAIT_SECONDS`)."""
    begun, go_on, plain = threading.Event(), threading.Event(), getattr(Run, method)

    def waiting(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(WAIT_SECONDS)
        return plain(*args)

    monkeypatch.setattr(Run, method, waiting)
    return begun, go_on


def jobs_pending(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many jobs run or wait, in the trainers that are served from here on."""
    workers: list[Worker] = []
    plain = Worker.__init__

    def noted(self: Worker, *args: Any) -> None:
        plain(self, *args)
        workers.append(self)

    monkeypatch.setattr(Worker, "__init__", noted)
    return lambda: sum(one.pending for one in workers)


async def until(true: Callable[[], bool]) -> None:
    """Wait for a state that nobody announces."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
