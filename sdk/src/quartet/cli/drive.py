"""Drives one local run: services up, run submitted, events followed into the folder and the display,
services down.

1. The services live exactly as long as `drive`, those of other machines, too: whatever ends it ends them.
2. The first Ctrl-C (or SIGTERM) stops the run after the step under way, however long that takes, and then
   drains the services; the second kills them. A terminal that is closed is like the first, unless that is
   ignored (`nohup`). What hangs, the orchestrator ends.
3. A run that was stopped, that failed before it sampled, or whose launcher was killed goes on when it is
   driven again with the same folder, and one that is completed with more steps.
4. Shown is what happens now; of what came before, from where it goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from quartet.cli.asked import Interrupts, listening
from quartet.cli.display import Display
from quartet.cli.env.installed import REFUSALS
from quartet.cli.figure import import_drawing
from quartet.cli.job import as_it_was
from quartet.cli.outputs import Outputs
from quartet.cli.reporting import Reporters
from quartet.cli.silence import name_the_silent, tell_standstill
from quartet.cli.starting import Start, tell_start
from quartet.cli.watch import all_events
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.call import RetryBudget, unary
from quartet.kit.channel import connect
from quartet.local.child import ChildSpec
from quartet.local.others import Others
from quartet.local.supervisor import Supervisor
from quartet.v1.orchestrator_service_pb2 import (
    RUN_PHASE_FAILED,
    RUN_PHASE_STOPPED,
    RUN_PHASE_STOPPING,
    GetRunStatusRequest,
    ResumeRunRequest,
    ResumeRunResponse,
    Run,
    StopRunRequest,
    SubmitRunRequest,
    SubmitRunResponse,
)
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

TICK_SECONDS = 0.25
#: The orchestrator checks environments and model, which the services load first, for as long as they allow.
SUBMIT_SECONDS = 7200.0
CALL_SECONDS = 30.0
DRAIN_SECONDS = 10.0
PATIENCE_SECONDS = 120.0  # the supervisor restarts an orchestrator much sooner, or fails the run


class RunRefused(ConfigError):
    """The orchestrator did not take the run: nothing of it was run."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: Run
    restarts: dict[str, int]
    interrupted: bool


#: Lets whoever may ask for the end reach it, while inside.
Listen = Callable[[Interrupts], AbstractContextManager[None]]


@contextmanager
def by_signals(interrupts: Interrupts) -> Iterator[None]:
    """Listens to Ctrl-C, SIGTERM and SIGHUP. On the main thread only."""
    with listening(interrupts.signalled, interrupts.asked.set):
        yield


async def drive(
    specs: Sequence[ChildSpec],
    others: Others,
    run_id: str,
    config_toml: str,
    outputs: Outputs,
    display: Display,
    reporter: Reporters,
    accepted: Callable[[], None],
    listen: Listen = by_signals,
    stop_s: float | None = None,
    environments: Sequence[str] = (),
) -> Outcome:
    """Run it, which has these environments, to its end; `accepted` is called once the orchestrator has it. A
    stop that is asked for has `stop_s` to be one in order, where that is said. Raises RunRefused,
    ServiceFailed, QuartetError, ConfigError where the services' token cannot be announced."""
    supervisor = Supervisor(specs)

    def kill() -> None:
        supervisor.kill_now()
        others.end()

    others.begin()
    interrupts = Interrupts(kill, display, as_it_was(outputs.folder))
    start = Start()
    with listen(interrupts):
        failed = {asyncio.create_task(one.wait_failed()) for one in (supervisor, others)}
        work = asyncio.create_task(
            _work(supervisor, others, run_id, config_toml, outputs, display, reporter, accepted, start)
        )
        ticks = asyncio.create_task(_tick(supervisor, others, outputs, display, reporter))
        stop = asyncio.create_task(
            _stop_when_asked(interrupts, supervisor, run_id, work, display, start.accepted, stop_s)
        )
        starting = asyncio.create_task(
            tell_start(lambda: [*supervisor.statuses, *others.statuses], start, display, environments)
        )
        silence = asyncio.create_task(name_the_silent(supervisor, outputs.progress, display))
        still = asyncio.create_task(tell_standstill(supervisor, outputs.progress, display))
        missing = asyncio.create_task(others.name_missing(display.say))
        beside = (ticks, stop, starting, silence, still, missing)
        try:
            await asyncio.wait({*failed, work}, return_when=asyncio.FIRST_COMPLETED)
            for one in failed:
                if one.done():
                    one.result()
            run = work.result() if not work.cancelled() else outputs.progress.run
        finally:
            for task in (*failed, work, *beside):
                task.cancel()
            await asyncio.gather(*failed, work, return_exceptions=True)
            for error in await asyncio.gather(*beside, return_exceptions=True):
                if isinstance(error, Exception):  # the run went on without it
                    display.say(f"what is told beside the run broke, please report it: {error!r}")
            display.say("stopping the services")
            if untold := others.end():
                display.say(untold)
            drawing = asyncio.create_task(asyncio.to_thread(outputs.draw, run_id))
            await supervisor.stop(DRAIN_SECONDS)  # to its end, also where a full disk takes no figure
            display.tick(outputs.progress, supervisor.statuses)
            await drawing
    return Outcome(run, supervisor.restarts | others.restarts, interrupts.asked.is_set())


async def _work(
    supervisor: Supervisor,
    others: Others,
    run_id: str,
    config_toml: str,
    outputs: Outputs,
    display: Display,
    reporter: Reporters,
    accepted: Callable[[], None],
    start: Start,
) -> Run:
    """Submit, follow, take the result; once it is accepted a stop reaches the run. Raises RunRefused,
    QuartetError."""
    began_ms = time.time() * 1000
    await others.wait_there()
    supervisor.start()
    await supervisor.wait_bound()
    await others.wait_up()
    async with connect(_orchestrator(supervisor)) as channel:
        stub = OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
        start.submitted.set()
        begun = await _submitted(stub, SubmitRunRequest(run_id=run_id, config_toml=config_toml))
        if begun.run.last_event < outputs.progress.last_event:
            raise RunRefused(
                f"the orchestrator knows {begun.run.last_event} events of the run {run_id!r}, and "
                f"{outputs.folder} has {outputs.progress.last_event}: its journal (data/) is gone; "
                "start a new run in another folder"
            )
        await asyncio.to_thread(accepted)  # a folder that is overwritten may hold a hundred gigabytes
        run = await _resumed(stub, begun.run)
        start.accepted.set()
        if run.submitted_at_ms < began_ms:
            display.say(f"goes on after step {run.step} of {run.max_steps}")
        outputs.progress.begin(run)
        reporter.begin(run)
        await _followed(stub, run, began_ms, outputs, display)
        return await _result(stub, run_id, outputs)


async def _followed(
    stub: OrchestratorServiceStub, run: Run, began_ms: float, outputs: Outputs, display: Display
) -> None:
    """Its events to the end, into the folder; what happens now is shown. Raises QuartetError."""
    events = all_events(
        stub,
        run,
        outputs.progress.last_event,
        include_rollouts=True,
        patience_s=PATIENCE_SECONDS,
        say=display.say,  # a full disk of its journal, for one: who knows it can make room
    )
    async for event in events:
        if outputs.record(event):
            # What an earlier part came to does not happen now.
            if event.event > run.last_event or event.at_ms >= began_ms:
                display.event(event, outputs.progress)
            if event.WhichOneof("kind") == "step" and event.step.step == run.max_steps - 1:
                # Nothing is sampled for later steps now, so a core is free; at the end all would wait.
                asyncio.get_running_loop().run_in_executor(None, import_drawing)


async def _result(stub: OrchestratorServiceStub, run_id: str, outputs: Outputs) -> Run:
    """The run as it ended, and its model in the folder. Raises QuartetError."""
    status = await unary(
        stub.GetRunStatus,
        GetRunStatusRequest(run_id=run_id),
        timeout_s=CALL_SECONDS,
        budget=RetryBudget(),
        wait_for_ready=True,
    )
    ended: Run = status.run
    # Here and not after the services stopped: the folder is the trainer's, and the run has ended.
    if ended.model_path:
        # In a thread: from another file system it is copied, which takes minutes.
        await asyncio.to_thread(outputs.take_checkpoint, Path(ended.model_path))
    return ended


async def _submitted(stub: OrchestratorServiceStub, request: SubmitRunRequest) -> SubmitRunResponse:
    try:
        response: SubmitRunResponse = await unary(
            stub.SubmitRun, request, timeout_s=SUBMIT_SECONDS, budget=RetryBudget(), wait_for_ready=True
        )
    except QuartetError as error:
        if error.reason in REFUSALS:
            raise RunRefused(error.message) from error
        raise
    return response


async def _resumed(stub: OrchestratorServiceStub, run: Run) -> Run:
    """The run, which goes on where it rests and can, also once a stop that was under way is over; where it
    has ended for good, as it ended."""
    if run.phase not in (RUN_PHASE_STOPPING, RUN_PHASE_STOPPED, RUN_PHASE_FAILED):
        return run
    try:
        request = ResumeRunRequest(run_id=run.run_id)
        response: ResumeRunResponse = await unary(stub.ResumeRun, request, timeout_s=CALL_SECONDS)
    except QuartetError as error:
        if run.phase == RUN_PHASE_FAILED and error.reason == "INVALID_REQUEST":
            return run
        raise
    return response.run


async def _tick(
    supervisor: Supervisor, others: Others, outputs: Outputs, display: Display, reporter: Reporters
) -> None:
    while True:
        reporter.tick()
        display.tick(outputs.progress, [*supervisor.statuses, *others.statuses])
        await asyncio.sleep(TICK_SECONDS)


async def _stop_when_asked(
    interrupts: Interrupts,
    supervisor: Supervisor,
    run_id: str,
    work: asyncio.Task[Run],
    display: Display,
    taken: asyncio.Event,
    stop_s: float | None = None,
) -> None:
    """On the first Ctrl-C: stop the run; the work then ends by itself, or is cancelled after `stop_s`."""
    await interrupts.asked.wait()
    if not taken.is_set():
        # A run that rests has nothing to stop, and would be gone on with behind that.
        work.cancel()
        return
    display.say("stopping after the step under way; Ctrl-C again kills everything")
    try:
        async with connect(_orchestrator(supervisor)) as channel:
            stub = OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
            await unary(stub.StopRun, StopRunRequest(run_id=run_id), timeout_s=CALL_SECONDS)
        _, late = await asyncio.wait({work}, timeout=stop_s)
        if late:
            display.say(
                f"the run was not STOPPED in {stop_s:.0f} s; what was not saved is done again by what goes on"
            )
    except QuartetError as error:
        display.say(f"the run could not be stopped in order ({error}); it can be resumed all the same")
    work.cancel()


def _orchestrator(supervisor: Supervisor) -> str:
    return next(status.address for status in supervisor.statuses if status.name == "orchestrator")
