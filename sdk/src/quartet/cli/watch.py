"""Following a run over the death and restart of its orchestrator.

1. Every event is yielded once, in order: the stream is opened again after the last number seen.
2. It ends with the event that says that the run ended. A run that was stopped and resumed, or extended, has
   such events in its past, where they do not count.
3. It never waits for ever: without a sign of life for `patience_s` it raises what the last attempt said.
   Time in which this process was stopped itself (Ctrl-Z) does not count (quartet.kit.awake).
   `say` is told after AWAY_SECONDS, once for each outage: that the orchestrator is away, or that it answers
   and cannot go on (its disk is full), and what the last attempt said. Where one becomes the other, of both.
   Where either was told, so is once that it is back, and how long nothing had come.
4. Another service that answers at its address is not the orchestrator: that is away.
5. A run that rests and is being started again (`quartet rl --resume`) is waited for, and then followed. Where
   nobody goes on with it any more it has ended as it did.
6. A run whose journal is not open yet is waited for before anything of it is followed: until then nobody
   knows which of its ends are past.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from quartet.cli.progress import ENDED, phase_name
from quartet.errors import QuartetError, has_no_method
from quartet.kit.awake import awake_s
from quartet.kit.call import RetryBudget, stream, unary
from quartet.v1.orchestrator_service_pb2 import (
    RUN_PHASE_PENDING,
    GetRunStatusRequest,
    GetRunStatusResponse,
    Run,
    WatchRunRequest,
    WatchRunResponse,
)
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

CALL_SECONDS = 30.0
IDLE_SECONDS = 20.0  # four heartbeats
AWAY_SECONDS = 5.0  # a restart on the same machine is over sooner
GONE_SECONDS = 30.0  # whoever was about to go on with a run has ended its services
AGAIN_SECONDS = 3600.0  # to load a large model, and to begin
RETRY_SECONDS = 0.25
PASSING = frozenset({"NOT_READY", "DEADLINE", "OVERLOADED"})  # what a restart of the other side looks like


async def run_as_it_stands(
    stub: OrchestratorServiceStub, run_id: str, *, patience_s: float, say: Callable[[str], None]
) -> Run:
    """What the orchestrator says of it now. One that answers too many others, or has not opened the run's
    journal, is waited for, one that is not there only as long as a call waits: its address may be wrong."""
    asked_at, told = awake_s(), False
    while True:
        try:
            request = GetRunStatusRequest(run_id=run_id)
            status: GetRunStatusResponse = await unary(
                stub.GetRunStatus, request, timeout_s=CALL_SECONDS, budget=RetryBudget()
            )
            run = status.run
            if run.phase != RUN_PHASE_PENDING or run.config_toml:
                return run
            failure, waits = QuartetError("NOT_READY", run.doing), run.doing
        except QuartetError as error:
            if error.reason != "OVERLOADED":
                raise
            failure = error
            waits = f"the orchestrator answers and cannot go on, waiting for it: {error.message}"
        if awake_s() - asked_at > patience_s:
            raise failure
        if not told:
            told = True
            say(waits)
        await asyncio.sleep(RETRY_SECONDS)


async def started_again(stub: OrchestratorServiceStub, run: Run, *, say: Callable[[str], None]) -> Run:
    """The run, once it goes on, where somebody is about to go on with it; else as it is, also where nobody
    did for AGAIN_SECONDS."""
    if run.phase in ENDED and run.doing:
        say(f"run {run.run_id} is {phase_name(run.phase)}, and {run.doing}: it is followed from there on")
    began = heard = awake_s()
    while run.phase in ENDED and run.doing and heard - began < AGAIN_SECONDS:
        await asyncio.sleep(RETRY_SECONDS)
        request = GetRunStatusRequest(run_id=run.run_id)
        try:
            run = (await unary(stub.GetRunStatus, request, timeout_s=CALL_SECONDS)).run
            heard = awake_s()
        except QuartetError as error:
            if error.reason not in PASSING or awake_s() - heard > GONE_SECONDS:
                raise
    return run


async def all_events(
    stub: OrchestratorServiceStub,
    run: Run,
    after_event: int,
    *,
    include_rollouts: bool,
    patience_s: float,
    say: Callable[[str], None] | None = None,
) -> AsyncIterator[WatchRunResponse]:
    """Those of a run after `after_event`, up to its end; of one that has ended, all that there are."""
    over = run.phase in ENDED
    # One that was set aside has no events here, and says why when it is asked for them.
    if over and run.last_event and after_event >= run.last_event:
        return
    events = watch_run(
        stub,
        run.run_id,
        after_event,
        history=run.last_event,
        include_rollouts=include_rollouts,
        patience_s=patience_s,
        say=say,
    )
    async for event in events:
        yield event
        if over and event.event >= run.last_event:
            return


async def watch_run(
    stub: OrchestratorServiceStub,
    run_id: str,
    after_event: int,
    *,
    history: int,
    include_rollouts: bool,
    patience_s: float,
    say: Callable[[str], None] | None = None,
) -> AsyncIterator[WatchRunResponse]:
    """The events of a run after `after_event`, until it ended."""
    last = after_event
    told: set[str] = set()
    heard = awake_s()
    while True:
        request = WatchRunRequest(run_id=run_id, after_event=last, include_rollouts=include_rollouts)
        failure = QuartetError("NOT_READY", "the orchestrator closed the stream before the run ended")
        answered = False
        try:
            async for event in stream(stub.WatchRun(request), idle_timeout_s=IDLE_SECONDS):
                now = awake_s()
                if say is not None and told:
                    say(f"the orchestrator is back after {now - heard:.0f} s")
                heard = now
                told.clear()
                if event.event == 0:
                    continue
                last = event.event
                yield event
                ended = event.WhichOneof("kind") == "phase" and event.phase.run.phase in ENDED
                if ended and event.event > history:
                    return
        except QuartetError as error:
            if error.reason not in PASSING and not has_no_method(error):
                raise
            failure, answered = error, _is_its_own(error)
        silent_s = awake_s() - heard
        if silent_s > patience_s:
            raise failure
        stands = "answers and cannot go on" if answered else "is away"
        if say is not None and silent_s > AWAY_SECONDS and stands not in told:
            told.add(stands)
            say(f"the orchestrator {stands}, waiting for it: {failure.message}")
        await asyncio.sleep(RETRY_SECONDS)


def _is_its_own(error: QuartetError) -> bool:
    """Whether the orchestrator itself refused the call. A DEADLINE is our own: it was silent."""
    return error.reason != "DEADLINE" and "grpc_code" not in error.metadata and not has_no_method(error)
