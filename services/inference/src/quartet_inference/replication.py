"""A replica's side of the weight plane, put together: what it follows, what it holds, what it says of itself.

1. The replica is ready when verified weights are served whose canary lives, and is not when it dies.
2. The follower ends the service if it fails: old weights are never served for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from quartet.inference import INFERENCE, UpdateRefusal, line
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.security import is_loopback
from quartet.kit.server import Service
from quartet.v1 import weights_pb2 as pb
from quartet.weights.service import SERVICE as WEIGHTS
from quartet.weights.service import add_weight_service
from quartet.weights.shared import SharedMemory
from quartet.weights.sources import Relays
from quartet.weights.transport import Transport
from quartet.weights.versions import Version

from quartet_inference.adapters import Adapters
from quartet_inference.adoption import Adopter
from quartet_inference.canary import CanaryWatch, Gate
from quartet_inference.config import InferenceConfig
from quartet_inference.engine import Engine, ServedWeights
from quartet_inference.layout import check_layout, declared_layout
from quartet_inference.pushed import adopt_pushed
from quartet_inference.relay import Holdings, RelayServicer, relay_address
from quartet_inference.updates import Follower, Publisher, ServedNews


@dataclass(frozen=True)
class _Said:
    """What a replica says of itself: at the gate, to those who wait, to health."""

    engine: Engine
    gate: Gate
    news: ServedNews
    health: Health

    def verdict(self, why: str) -> None:
        """The canary died for this reason, or lives."""
        self.gate.set_out_of_service(why)
        if why:
            self.health.set_not_ready(INFERENCE, why)
        else:
            self.health.set_ready(INFERENCE)

    def served(self) -> None:
        """Something else is served."""
        self.news.tell()
        self.health.set_ready(WEIGHTS)

    def taken(self, version: Version) -> None:
        """What was pushed is served; of other runs an adapter says nothing."""
        self.gate.set_update_taken(version.run_id if version.manifest.adapter_config else None)

    def refused(self, why: UpdateRefusal) -> None:
        """An update failed."""
        self.gate.set_update_refused(why)
        if self.engine.info().served is None:
            self.health.set_not_ready(INFERENCE, line(why))


class _Replication:
    """What a replica follows and holds of the weight plane."""

    def __init__(
        self,
        config: InferenceConfig,
        engine: Engine,
        gate: Gate,
        news: ServedNews,
        health: Health,
        adapters: Adapters,
    ) -> None:
        """`gate` stands before the engine."""
        self._config = config
        self._engine = engine
        self._gate = gate
        self._health = health
        self._adapters = adapters
        pushed_adapters = config.adapters.max_count if config.accept_push else 0
        self._holdings = Holdings(config.held_versions, config.held_delta_bytes, pushed_adapters)
        self.said = _Said(engine, gate, news, health)
        self._canaries = CanaryWatch(engine, config.canary_tolerance, self.said.verdict)
        gate.set_verdict(self._verdict)
        self._relays = Relays(config.weights_security)
        self._adopter = Adopter(engine, self._canaries, self._served, adapters.adopt)

    def service(self) -> Service:
        """What hands on the versions that it holds, and takes those that are pushed."""
        fits = self._fits if self._config.accept_push else None
        servicer = RelayServicer(self._holdings, self._health.draining, accept_push=fits)
        return Service(WEIGHTS, add_weight_service, servicer)

    async def follow(self, bound: asyncio.Future[str] | None) -> None:
        """Keep the engine at the newest version until cancelled; `bound` will be this server's address."""
        config, said = self._config, self.said
        if config.accept_push:
            self._adapters.start(None, self._own_model_serves)
            await adopt_pushed(self._holdings.store, config.run_id, self._adopter, said.taken, said.refused)
            return
        address = ""
        if config.relay and bound is not None:
            address = relay_address(config.advertise_address, await bound)
        async with connect(config.weights_address, security=config.weights_security, bulk=True) as channel:
            publisher = Publisher(channel, config.run_id, self._relays, address, _transports(config))
            follower = Follower(
                cast(Engine, self._gate),
                publisher,
                self._holdings,
                self._adopter,
                said.refused,
                self._adapters.follows,
                self._gate.set_update_taken,
                self._gate.set_away,
                self._gate.set_update_taken,
            )
            self._adapters.start(publisher, self._own_model_serves, follower.look_again)
            await follower.run()

    async def close(self) -> None:
        """Follow and relay nothing any more."""
        self._canaries.close()
        await self._adapters.close()
        await self._relays.close()

    async def _verdict(self, run_id: str) -> str:
        await self._canaries.scored()
        return await self._adapters.verdict(run_id)

    def _fits(self, manifest: pb.WeightManifest) -> None:
        # An adapter is checked when it is loaded; a run that is not served here is held for others.
        if not manifest.adapter_config and self._config.run_id in ("", manifest.run_id):
            check_layout(declared_layout(manifest), self._engine.layout())

    def _served(self) -> None:
        self.said.served()
        self._adapters.base_changed()

    def _own_model_serves(self, weights: ServedWeights) -> None:
        self._canaries.swapped(weights, None)
        self.said.served()


@asynccontextmanager
async def replicating(
    config: InferenceConfig,
    engine: Engine,
    gate: Gate,
    news: ServedNews,
    health: Health,
    adapters: Adapters,
    bound: asyncio.Future[str] | None,
) -> AsyncIterator[list[Service]]:
    """Keep the engine and its adapters at the newest versions; the services that hand them on.

    `gate` stands before the engine; `bound` will be the address that the server listens on.
    """
    replication = _Replication(config, engine, gate, news, health, adapters)
    services = [replication.service()]
    if config.weights_address:
        health.set_not_ready(INFERENCE, f"no verified weights from {config.weights_address} yet")
        health.set_not_ready(WEIGHTS, "no weights yet")
    else:
        replication.said.verdict("")
        health.set_ready(WEIGHTS)
    if not config.weights_address and not config.accept_push:
        yield services
        return
    async with asyncio.TaskGroup() as group:
        task = group.create_task(replication.follow(bound), name="follow-weights")
        try:
            yield services
        finally:
            task.cancel()
            await replication.close()


def _transports(config: InferenceConfig) -> tuple[Transport, ...]:
    """Shared memory where the publisher is on this host: one mapping for all replicas of it."""
    near = is_loopback(config.weights_address)
    return (SharedMemory(),) if near and config.shared_memory else ()
