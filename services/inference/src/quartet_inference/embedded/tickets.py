"""Requests as the engine keeps them: where their events go."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quartet.errors import QuartetError

from quartet_inference.embedded.sequence import RunningSequence
from quartet_inference.engine import Event, Request


@dataclass(eq=False)
class Ticket:
    """One request: where its events go, and which of its completions still run."""

    request: Request
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event | QuartetError] = field(default_factory=asyncio.Queue)
    sequences: list[RunningSequence] = field(default_factory=list)


def deliver(events: list[tuple[Ticket, Event | QuartetError]]) -> None:
    """Runs in the loop that asked."""
    for ticket, event in events:
        ticket.events.put_nowait(event)
