"""The roll call: every service that runs the runs, which build it has, and whether it is in service.

1. All are asked at once, for ASK_S; one that does not answer is told with the reason, and holds up nobody.
2. What is asked is their health, which needs no token and no place among the calls under way.
3. MAX_SERVICES at most, in the order in which they are configured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from quartet.errors import QuartetError
from quartet.kit.build import Answer, Build, ask
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator.assembly import Services
from quartet_orchestrator.peers import Peer

ASK_S = 2.0
# More do not fit beside the runs in one message.
MAX_SERVICES = 256


async def roll_call(services: Services, own: Build, *, ready: bool) -> list[pb.ServiceStatus]:
    """The orchestrator itself first: what it runs, and whether it is in service."""
    asked: list[tuple[str, str, Awaitable[Answer]]] = []
    unnamed = []
    if (trainer := services.trainer) is not None:
        asked.append(("trainer", trainer.address, ask(trainer.channel, ASK_S)))
    for service, peers in (("envhost", services.hosts), ("inference", services.policies)):
        try:
            here = await peers.here()
        except QuartetError as error:
            unnamed.append(_status(service, "", Answer(error=error.message)))
            continue
        asked += [(service, peer.address, _of_peer(peer)) for peer in here[: MAX_SERVICES - len(asked)]]
    answers = await asyncio.gather(*(answer for _, _, answer in asked))
    told = [_status(*one[:2], answer) for one, answer in zip(asked, answers, strict=True)]
    return [_status("orchestrator", "", Answer(own, ready)), *told, *unnamed]


async def _of_peer(peer: Peer[Any]) -> Answer:
    with peer.called():
        return await ask(peer.channel, ASK_S)


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
