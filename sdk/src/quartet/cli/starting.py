"""Says what a run waits for that has not begun: the services that do not listen yet, by name, then the
orchestrator, which checks the run.

1. A start that takes less than PATIENT_SECONDS is not spoken of, and nothing is once the run is accepted.
2. After that there is a line wherever it waits for something else, at most one in NEXT_SECONDS.
3. Machines that are not there are told of elsewhere (quartet/local/others.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quartet.cli.display import Display
from quartet.local.supervisor import State, Status

PATIENT_SECONDS = 5.0  # the demo's services need three
NEXT_SECONDS = 5.0  # a line for each service, at the worst


@dataclass(frozen=True)
class Start:
    """How far the start of a run has come."""

    #: It was handed to the orchestrator, for which all services listen.
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    #: The orchestrator has it.
    accepted: asyncio.Event = field(default_factory=asyncio.Event)


async def tell_start(statuses: Callable[[], Sequence[Status]], start: Start, display: Display) -> None:
    """Until the run is accepted."""
    said, pause_s = "", PATIENT_SECONDS
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(start.accepted.wait(), pause_s)
            return
        waits = _waits_for(statuses(), start)
        if waits not in ("", said):
            display.say(f"waiting for {waits}")
            said = waits
        pause_s = NEXT_SECONDS


def _waits_for(statuses: Sequence[Status], start: Start) -> str:
    """In words; empty where no service is waited for."""
    if start.submitted.is_set():
        return "the orchestrator, which checks the run: for that its environments are loaded"
    begun = [one for one in statuses if one.pid is not None and one.state is not State.UP]
    return ", ".join(f"{one.name} ({one.state.value}{f': {one.why}' if one.why else ''})" for one in begun)
