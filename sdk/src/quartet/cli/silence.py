"""Says why nothing happens in a run: which local service is frozen, or what the run waits for.

1. Services are asked only after SILENCE_SECONDS without an event; a long step of a healthy trainer is no
   reason to speak.
2. A service that does not listen yet after SLOW_SECONDS is named once, with its log.
3. A service that accepts a connection and does not answer its health check is named once, and once more when
   it answers again. (One that is dead is the supervisor's to restart.)
4. A run that has had no event for STILL_SECONDS says what it is doing, and again whenever that time has
   doubled.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.cli.display import Display
from quartet.cli.progress import Progress
from quartet.errors import QuartetError
from quartet.kit.call import unary
from quartet.kit.channel import connect
from quartet.local.supervisor import State, Status, Supervisor
from quartet.v1.orchestrator_service_pb2 import GetRunStatusRequest
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

SILENCE_SECONDS = 10.0  # several steps of the demo; rollouts of a large model arrive more often, too
SLOW_SECONDS = 60.0  # an engine that loads a large model takes minutes
ANSWER_SECONDS = 3.0  # a health check computes nothing
STILL_SECONDS = 60.0  # somebody looks at the screen, and wonders


async def name_the_silent(supervisor: Supervisor, progress: Progress, display: Display) -> None:
    """For ever."""
    frozen: set[str] = set()
    starting: Counter[str] = Counter()
    while True:
        seen = progress.last_event
        await asyncio.sleep(SILENCE_SECONDS)
        if progress.last_event != seen and not frozen:
            continue
        for status in supervisor.statuses:
            if status.state is not State.STARTING or status.pid is None:  # before other machines are there
                continue
            starting[status.name] += 1
            if starting[status.name] == SLOW_SECONDS // SILENCE_SECONDS:
                display.say(f"{status.name} is still starting; logs/{status.name}.log says what it is doing")
        up = [status for status in supervisor.statuses if status.state is State.UP]
        answers = await asyncio.gather(*(_answers(status.address) for status in up))
        for status, answered in zip(up, answers, strict=True):
            if answered and status.name in frozen:
                frozen.discard(status.name)
                display.say(f"{status.name} answers again")
            elif not answered and status.name not in frozen:
                frozen.add(status.name)
                display.say(
                    f"{status.name} (process {status.pid}) does not answer: is it stopped, or the machine "
                    "out of memory? The run waits for it"
                )


async def tell_standstill(supervisor: Supervisor, progress: Progress, display: Display) -> None:
    """For ever."""
    still_s, due_s = 0.0, STILL_SECONDS
    while True:
        seen = progress.last_event
        await asyncio.sleep(SILENCE_SECONDS)
        if progress.last_event != seen:
            still_s, due_s = 0.0, STILL_SECONDS
            continue
        still_s += SILENCE_SECONDS
        if still_s >= due_s:
            due_s *= 2
            up = [one for one in supervisor.statuses if one.name == "orchestrator" and one.state is State.UP]
            if up and (doing := await _doing(up[0], progress.run.run_id)):
                display.say(f"still {doing}; logs/ has what the services say")


async def _doing(orchestrator: Status, run_id: str) -> str:
    """What a run does; empty where it is over, or that is not to be had."""
    async with connect(orchestrator.address) as channel:
        stub = OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            asked = GetRunStatusRequest(run_id=run_id)
            return str((await unary(stub.GetRunStatus, asked, timeout_s=ANSWER_SECONDS)).run.doing)
        except QuartetError:  # before it is submitted, or the orchestrator is named as frozen
            return ""


async def _answers(address: str) -> bool:
    """Whether the service says anything at all; a refusal is an answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    return True
