"""Says which local service is frozen when nothing happens in a run.

1. Services are asked only after SILENCE_SECONDS without an event; a long step of a healthy trainer is no
   reason to speak.
2. A service that does not listen yet after SLOW_SECONDS is named once, with its log.
3. A service that accepts a connection and does not answer its health check is named once, and once more when
   it answers again. (One that is dead is the supervisor's to restart.)
"""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.cli.display import Display
from quartet.cli.progress import Progress
from quartet.local.supervisor import State, Supervisor

SILENCE_SECONDS = 10.0  # several steps of the demo; rollouts of a large model arrive more often, too
SLOW_SECONDS = 60.0  # an engine that loads a large model takes minutes
ANSWER_SECONDS = 3.0  # a health check computes nothing


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
