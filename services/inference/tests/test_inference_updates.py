"""The follower against publishers: what it fetches, and how often, where announcement and contents part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.sources import Relays
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet_inference import updates
from quartet_inference.canary import CanaryWatch
from quartet_inference.engine import EngineInfo, ServedWeights
from quartet_inference.relay import Holdings
from quartet_inference.updates import Adopter, Follower


class Publisher(WeightServicer):
    """The real servicer, which may announce what it does not hold, or refuse to announce."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store)
        self.lies: list[pb.VersionAnnounced] = []
        self.refusals = 0
        self.truth = asyncio.Event()
        self.fetches = self.manifests = self.watches = 0

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchResponse]:
        self.watches += 1
        if self.refusals:
            self.refusals -= 1
            raise QuartetError("INVALID_REQUEST", "not today")
        for lie in self.lies:
            yield pb.WatchResponse(announced=lie)
        if self.lies:
            await self.truth.wait()
        async for response in super().Watch(request, context):
            yield response

    async def GetManifest(
        self, request: pb.GetManifestRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetManifestResponse:
        self.manifests += 1
        return await super().GetManifest(request, context)

    async def fetch_encoded(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        self.fetches += 1
        async for frame in super().fetch_encoded(request, context):
            yield frame


class Recorder:
    """An engine as far as a follower can see."""

    def __init__(self) -> None:
        self.swaps: list[tuple[bool, ServedWeights]] = []
        self.stages = 0
        self.refuses = ""

    def base_digest(self) -> bytes:
        return b"base"

    def info(self) -> EngineInfo:
        served = self.swaps[-1][1] if self.swaps else None
        return EngineInfo("", "float32", 1, 1, 1, (), served, 0, 0, 0, len(self.swaps), 0.0, False)

    async def stage(self, tensors: Mapping[str, Tensor]) -> Any:
        self.stages += 1
        if self.refuses:
            raise QuartetError(self.refuses, "not this one")
        return tensors

    async def swap(self, staged: Any, weights: ServedWeights) -> None:
        self.swaps.append((staged is not None, weights))


def weights(value: int) -> dict[str, Tensor]:
    return {"w": Tensor("F32", (1,), bytes([value, 0, 0, 0]))}


class Following:
    """A follower at work and what it does."""

    def __init__(self) -> None:
        self.store = WeightStore(keep=4)
        self.publisher = Publisher(self.store)
        self.engine = Recorder()
        self.refused: list[str] = []
        self.follower: Any = None

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await start([Service(SERVICE, add_weight_service, self.publisher)], ServerConfig(), Health())
        async with connect(server.address, bulk=True) as channel:
            engine: Any = self.engine
            adopter = Adopter(engine, CanaryWatch(engine, None, lambda why: None), lambda: None)
            publisher = updates.Publisher(channel, "", Relays(ClientSecurity()))
            self.follower = Follower(engine, publisher, Holdings(2, 1 << 30), adopter, self.refused.append)
            task = asyncio.create_task(self.follower.run())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch) -> Following:
    monkeypatch.setattr(updates, "BACKOFF_SECONDS", (0.1, 0.2))
    return Following()


async def test_contents_other_than_announced_are_fetched_once_and_asked_for_with_pauses(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """promise 5 of updates: the publisher was restarted between its announcement and the fetch."""
    pauses: list[float] = []
    backoff_s = updates._backoff_s

    def pausing(failures: int) -> float:
        pauses.append(backoff_s(failures))
        return pauses[-1]

    monkeypatch.setattr(updates, "_backoff_s", pausing)
    held = following.store.publish("r", 3, weights(1))
    following.publisher.lies = [pb.VersionAnnounced(run_id="r", version=3, digest=b"x" * 16)]
    async with following.running():
        await following.until(lambda: bool(following.engine.swaps))
        await following.until(lambda: following.publisher.manifests >= 5)
        assert following.engine.swaps == [(True, ServedWeights("r", 3, held.digest))]
        assert following.publisher.fetches == 1
        assert following.publisher.manifests <= len(pauses) + 1, "asked for once, and again after each pause"
        assert all(0.05 <= pause <= 0.2 for pause in pauses)
        following.publisher.truth.set()
        # Announcement and contents agree: the follower asks and waits for nothing but the next announcement.
        await following.until(lambda: following.follower._failures == 0)
        settled = following.publisher.manifests
        following.store.publish("r", 4, weights(2))
        await following.until(lambda: following.engine.info().served.version == 4)
        assert following.publisher.manifests == settled + 1
    assert following.publisher.fetches == 2 and following.refused == []


async def test_every_change_is_followed_and_held_contents_are_not_fetched(following: Following) -> None:
    """Invariant 4: newer, another run, a lower number, equal contents under another number."""
    digests = {}
    async with following.running():
        for run_id, version, value in (("a", 7, 1), ("a", 8, 2), ("b", 0, 3), ("b", 1, 3)):
            digests[value] = following.store.publish(run_id, version, weights(value)).digest
            named = ServedWeights(run_id, version, digests[value])
            await following.until(lambda named=named: following.engine.info().served == named)
    assert [fetched for fetched, _ in following.engine.swaps] == [True, True, True, False]
    assert following.publisher.fetches == 3


async def test_a_publisher_that_refuses_to_announce_is_asked_again(following: Following) -> None:
    """Invariant 3: what is permanent at one publisher ends with its restart."""
    following.store.publish("r", 0, weights(1))
    following.publisher.refusals = 2
    async with following.running():
        await following.until(lambda: bool(following.engine.swaps))
    assert len(following.refused) == 2 and "not today" in following.refused[0]


async def test_promise_3_of_updates_what_the_engine_refuses_as_it_is_is_refused_once(
    following: Following,
) -> None:
    """A replica that follows "whoever came last" meets runs that were made for other models."""
    following.engine.refuses = "INVALID_REQUEST"
    following.store.publish("other model", 0, weights(1))
    async with following.running():
        await following.until(lambda: following.publisher.watches == 2)
        # Looked at again, and passed over, before what comes next is taken.
        following.store.publish("other model", 1, weights(2))
        await following.until(lambda: len(following.refused) == 2)
        following.engine.refuses = ""
        following.store.publish("ours", 0, weights(3))
        await following.until(lambda: bool(following.engine.swaps))
    assert (following.engine.stages, following.publisher.fetches) == (3, 3)
    assert [served.run_id for _, served in following.engine.swaps] == ["ours"]
    assert len(following.refused) == 2
