"""A trainer and replicas that relay versions to each other, on real servers, with engines that only count."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from loopback import LOOPBACK
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.health import Health
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.weights import arrival, sources
from quartet.weights.payload import CHUNK_BYTES
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.sources import Relays
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet_inference import relay, updates
from quartet_inference.adoption import Adopter
from quartet_inference.canary import CanaryWatch
from quartet_inference.engine import EngineInfo, ServedWeights
from quartet_inference.relay import Holdings, RelayServicer
from quartet_inference.updates import Follower, Publisher

CHUNKS = 12


def tensors(seed: int, changed: int = 0) -> dict[str, Tensor]:
    """Twelve chunks of random bytes, of which the first `changed` differ from those of the seed alone."""
    data = bytearray(random.Random(seed).randbytes(CHUNKS * CHUNK_BYTES))
    data[:changed] = bytes(byte ^ 1 for byte in data[:changed])
    return {"w": Tensor("BF16", (len(data) // 2,), bytes(data))}


class Trainer(WeightServicer):
    """The real servicer, which counts what it sends, and sends slowly."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store)
        self.store = store
        self.sent = self.streams = 0
        self.pause_s = 0.0
        self.lies = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.gate_at = 0

    async def fetch_encoded(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[bytes, None]:
        self.streams += 1
        if self.lies:
            request.version = 0
        async for frame in super().fetch_encoded(request, context):
            if self.sent >= self.gate_at:
                await self.gate.wait()
            await asyncio.sleep(self.pause_s)
            self.sent += len(frame)
            yield frame


class Engine:
    """An engine as far as a follower can see."""

    def __init__(self) -> None:
        self.served: ServedWeights | None = None
        self.swaps = 0
        self.staging = asyncio.Event()
        self.staging.set()

    def base_digest(self) -> bytes:
        return b"base"

    def info(self) -> EngineInfo:
        return EngineInfo("", "float32", 64, 1, 1, (), self.served, 0, 0, 0, self.swaps, 0.0, False)

    async def stage(self, tensors: Mapping[str, Tensor]) -> Any:
        await self.staging.wait()
        return tensors

    async def swap(self, staged: Any, weights: ServedWeights) -> None:
        self.served, self.swaps = weights, self.swaps + 1

    async def score(self, request: Any) -> Any:
        raise QuartetError("NOT_READY", "there is no model here")


class Replica:
    """A follower and its relay, on a real server."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = Engine()
        self.holdings = Holdings(2, 1 << 30)
        self.servicer = RelayServicer(self.holdings, asyncio.Event())
        self.refused: list[str] = []
        self.relays = Relays(ClientSecurity())
        self.sent = 0
        self.server: RunningServer
        self.task: asyncio.Task[None]

    @property
    def version(self) -> int | None:
        return self.engine.served.version if self.engine.served else None

    async def kill(self) -> None:
        """No goodbye: the server is gone at once, and so is the follower."""
        await self.server.stop(0)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    @asynccontextmanager
    async def running(self, trainer: str) -> AsyncIterator[Replica]:
        self.server = await start(
            [Service(SERVICE, add_weight_service, self.servicer)], ServerConfig(), Health()
        )
        async with connect(trainer, bulk=True) as channel:
            engine: Any = self.engine
            adopter = Adopter(engine, CanaryWatch(engine, None, lambda why: None), lambda: None)
            publisher = Publisher(channel, "", self.relays, self.server.address)
            follower = Follower(
                engine, publisher, self.holdings, adopter, lambda one: self.refused.append(one.why)
            )
            self.task = asyncio.create_task(follower.run())
            try:
                yield self
            finally:
                await self.kill()
                await self.relays.close()


def size(manifest: pb.WeightManifest) -> int:
    return int(manifest.payload_bytes)


class Fleet:
    """A trainer and replicas that joined one after the other: place i of the tree is replica i."""

    def __init__(self, trainer: Trainer, server: RunningServer, stack: AsyncExitStack) -> None:
        self.trainer, self.server, self._stack = trainer, server, stack
        self.replicas: list[Replica] = []

    async def add(self, count: int) -> None:
        for _ in range(count):
            replica = Replica(f"replica {len(self.replicas)}")
            await self._stack.enter_async_context(replica.running(self.server.address))
            self.replicas.append(replica)
            joined = len(self.replicas)
            await until(lambda joined=joined: len(self.trainer._relays._relays.get("", [])) >= joined)

    async def publish(self, version: int, values: Mapping[str, Tensor], **more: Any) -> pb.WeightManifest:
        return await asyncio.to_thread(self.trainer.store.publish, "r", version, values, **more)

    def came(self) -> int:
        """Bytes that every replica has checked of what is on its way."""
        under_way = [replica.holdings._arrival for replica in self.replicas]
        return min(one._verified if one else 0 for one in under_way)

    async def serve(self, version: int, among: list[Replica] | None = None) -> None:
        await until(lambda: all(one.version == version for one in among or self.replicas))


async def until(true: Callable[[], bool], limit_s: float = 30) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(updates, "BACKOFF_SECONDS", (0.05, 0.1))
    monkeypatch.setattr(arrival, "SIGN_SECONDS", 0.1)
    # A loaded machine is late by a second; nothing but a frozen relay is late by so much.
    monkeypatch.setattr(sources, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(relay, "START_SECONDS", 0.4)
    trainer = Trainer(WeightStore(keep=2))
    own = ServerConfig(address=f"{LOOPBACK}:0")  # a test may end it and start another at its port
    server = await start([Service(SERVICE, add_weight_service, trainer)], own, Health())
    async with AsyncExitStack() as stack:
        yield Fleet(trainer, server, stack)
    await server.stop(0)
