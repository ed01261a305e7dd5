"""The roll call: every service that runs the runs, which build it has, and whether it is in service.

1. All are asked at once, for ASK_S; one that does not answer is told with the reason, and holds up nobody.
   The addresses of a tier are looked up for NAME_S at most.
2. What is asked is their health, which needs no token and no place among the calls under way.
3. MAX_SERVICES at most, in the order in which they are configured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import ExitStack

from quartet.errors import QuartetError
from quartet.kit.build import Answer, Build, ask
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator.assembly import Services

ASK_S = 2.0
NAME_S = 1.0
# More do not fit beside the runs in one message.
MAX_SERVICES = 256


async def roll_call(services: Services, own: Build, *, ready: bool) -> list[pb.ServiceStatus]:
    """The orchestrator itself first: what it runs, and whether it is in service."""
    found = [_status("orchestrator", "", Answer(own, ready))]
    asked: list[tuple[str, str, Awaitable[Answer]]] = []
    if (trainer := services.trainer) is not None:
        asked.append(("trainer", trainer.address, ask(trainer.channel, ASK_S)))
    # A peer that leaves meanwhile keeps its channel until it was asked.
    with ExitStack() as held:
        for service, peers in (("envhost", services.hosts), ("inference", services.policies)):
            try:
                async with asyncio.timeout(NAME_S):
                    here = await peers.here()
            except (QuartetError, TimeoutError) as error:
                why = (
                    error.message if isinstance(error, QuartetError) else f"no addresses within {NAME_S:g} s"
                )
                found.append(_status(service, "", Answer(error=why)))
                continue
            for peer in here[: max(0, MAX_SERVICES - len(found) - len(asked))]:
                held.enter_context(peer.called())
                asked.append((service, peer.address, ask(peer.channel, ASK_S)))
        answers = await asyncio.gather(*(answer for _, _, answer in asked))
    found[1:1] = [_status(*one[:2], answer) for one, answer in zip(asked, answers, strict=True)]
    return found[:MAX_SERVICES]


def _status(service: str, address: str, said: Answer) -> pb.ServiceStatus:
    build = said.build
    return pb.ServiceStatus(
        service=service,
        address=address,
        release=build.release,
        sdk_build=build.sdk,
        build=build.own,
        ready=said.ready,
        error=said.error,
    )
