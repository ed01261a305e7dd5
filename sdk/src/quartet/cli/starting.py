"""Says what a run waits for that has not begun: the services that do not listen yet, by name, then the
orchestrator, which checks the run, with the environments that are still being loaded for that.

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
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.call import unary
from quartet.kit.channel import connect
from quartet.local.supervisor import State, Status
from quartet.local.wiring import service_of
from quartet.v1.envhost_service_pb2 import ListEnvironmentsRequest, ListEnvironmentsResponse
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceStub

PATIENT_SECONDS = 5.0  # the demo's services need three
NEXT_SECONDS = 5.0  # a line for each service, at the worst
ANSWER_SECONDS = 5.0  # a list of what is known computes nothing


@dataclass(frozen=True)
class Start:
    """How far the start of a run has come."""

    #: It was handed to the orchestrator, for which all services listen.
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    #: The orchestrator has it.
    accepted: asyncio.Event = field(default_factory=asyncio.Event)


async def tell_start(
    statuses: Callable[[], Sequence[Status]], start: Start, display: Display, environments: Sequence[str] = ()
) -> None:
    """Until the run, which has these environments, is accepted."""
    said, pause_s = "", PATIENT_SECONDS
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(start.accepted.wait(), pause_s)
            return
        waits = await _waits_for(statuses(), start, environments)
        if waits not in ("", said) and not start.accepted.is_set():  # hosts were asked meanwhile
            display.say(f"waiting for {waits}")
            said = waits
        pause_s = NEXT_SECONDS


async def _waits_for(statuses: Sequence[Status], start: Start, environments: Sequence[str]) -> str:
    """In words; empty where no service is waited for."""
    if start.submitted.is_set():
        loading = await _loading(statuses, environments)
        named = f" (not loaded yet: {', '.join(loading)})" if loading else ""
        return f"the orchestrator, which checks the run: for that its environments are loaded{named}"
    begun = [one for one in statuses if one.pid is not None and one.state is not State.UP]
    return ", ".join(f"{one.name} ({one.state.value}{f': {one.why}' if one.why else ''})" for one in begun)


async def _loading(statuses: Sequence[Status], environments: Sequence[str]) -> list[str]:
    """Those that no host has loaded, of those that some host knows, in the order of the run; none where no
    host can say."""
    known: set[str] = set()
    loaded: set[str] = set()
    for host in statuses:
        if service_of(host.name) != "envhost" or host.state is not State.UP:
            continue
        try:
            async with connect(host.address) as channel:
                stub = EnvHostServiceStub(channel)  # type: ignore[no-untyped-call]
                told: ListEnvironmentsResponse = await unary(
                    stub.ListEnvironments, ListEnvironmentsRequest(), timeout_s=ANSWER_SECONDS
                )
        except (QuartetError, ConfigError):  # its own doors, or it is away: the line says what is known
            continue
        known |= {one.id for one in told.environments}
        loaded |= {one.id for one in told.environments if one.api}
    return [one for one in environments if one in known - loaded]
