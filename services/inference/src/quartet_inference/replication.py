"""A replica's side of the weight plane, put together: what it follows, what it holds, what it says of itself.

1. The replica is ready when verified weights are served whose canary lives, and is not when it dies.
2. The follower ends the service if it fails: old weights are never served for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import Service
from quartet.weights.service import SERVICE as WEIGHTS
from quartet.weights.service import add_weight_service
from quartet.weights.sources import Relays

from quartet_inference.canary import CanaryWatch, Gate
from quartet_inference.config import InferenceConfig
from quartet_inference.engine import Engine
from quartet_inference.relay import Holdings, RelayServicer, relay_address
from quartet_inference.updates import Adopter, Follower, Publisher, ServedNews

INFERENCE = "quartet.v1.InferenceService"


@asynccontextmanager
async def replicating(
    config: InferenceConfig,
    engine: Engine,
    gate: Gate,
    news: ServedNews,
    health: Health,
    bound: asyncio.Future[str] | None,
) -> AsyncIterator[list[Service]]:
    """Keep the engine at the newest version; the services that hand it on.

    `gate` stands before the engine; `bound` will be the address that the server listens on.
    """
    holdings = Holdings(config.held_versions)
    services = [Service(WEIGHTS, add_weight_service, RelayServicer(holdings, health.draining))]

    def verdict(why: str) -> None:
        gate.set_out_of_service(why)
        if why:
            health.set_not_ready(INFERENCE, why)
        else:
            health.set_ready(INFERENCE)

    def served() -> None:
        news.tell()
        health.set_ready(WEIGHTS)

    def refused(why: str) -> None:
        if engine.info().served is None:
            health.set_not_ready(INFERENCE, why)

    if not config.weights_address:
        verdict("")
        health.set_ready(WEIGHTS)
        yield services
        return
    health.set_not_ready(INFERENCE, f"no verified weights from {config.weights_address} yet")
    health.set_not_ready(WEIGHTS, "no weights yet")
    canaries = CanaryWatch(engine, config.canary_tolerance, verdict)
    relays = Relays(config.weights_security)

    async def follow() -> None:
        address = ""
        if config.relay and bound is not None:
            address = relay_address(config.advertise_address, await bound)
        async with connect(config.weights_address, security=config.weights_security, bulk=True) as channel:
            publisher = Publisher(channel, config.run_id, relays, address)
            adopter = Adopter(engine, canaries, served)
            await Follower(cast(Engine, gate), publisher, holdings, adopter, refused).run()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(follow(), name="follow-weights")
        try:
            yield services
        finally:
            task.cancel()
            canaries.close()
            await relays.close()
