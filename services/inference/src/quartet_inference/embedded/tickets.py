"""Requests as the engine keeps them: where their events go, and which weights may answer them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quartet.errors import QuartetError

from quartet_inference.embedded.sequence import RunningSequence
from quartet_inference.engine import Event, Request, ScoreRequest, ServedWeights


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


def not_ready() -> QuartetError:
    """The error of an engine that is being closed."""
    return QuartetError("NOT_READY", "the engine is stopping")


def refusal(request: Request | ScoreRequest, served: ServedWeights | None) -> QuartetError | None:
    """Why these weights cannot answer a request; None where they can."""
    if served is None:
        return QuartetError("NOT_READY", "no verified weights are served yet")
    if request.run_id not in ("", served.run_id):
        return QuartetError(
            "RUN_NOT_SERVED",
            f"run {served.run_id or '(base model)'} is served",
            have=served.run_id,
            want=request.run_id,
        )
    exact = request.exact_version
    least = request.min_version if isinstance(request, Request) else 0
    if served.version < least or exact not in (None, served.version):
        want = least if exact is None else exact
        return QuartetError(
            "VERSION_UNAVAILABLE", f"version {served.version} is served", have=served.version, want=want
        )
    return None
