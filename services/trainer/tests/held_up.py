"""A method of a run that waits, so that a test can look at what happens meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from quartet_trainer.run import Run

WAIT_SECONDS = 20.0


def held_up(monkeypatch: pytest.MonkeyPatch, method: str) -> tuple[threading.Event, threading.Event]:
    """Events: the method was called; it may go on (set by the test, within `WAIT_SECONDS`)."""
    begun, go_on, plain = threading.Event(), threading.Event(), getattr(Run, method)

    def waiting(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(WAIT_SECONDS)
        return plain(*args)

    monkeypatch.setattr(Run, method, waiting)
    return begun, go_on
