"""Replicas that relay versions to each other: who sends what, what passes early, whom nobody waits for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.health import Health
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.weights import arrival, sources
from quartet.weights.fetch import fetch_version
from quartet.weights.payload import CHUNK_BYTES
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.sources import Relays
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet_inference import relay, updates
from quartet_inference.canary import CanaryWatch
from quartet_inference.engine import EngineInfo, ServedWeights
from quartet_inference.relay import Holdings, RelayServicer, relay_address
from quartet_inference.updates import Adopter, Follower, Publisher

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
    ) -> AsyncIterator[bytes]:
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
            follower = Follower(engine, publisher, self.holdings, adopter, self.refused.append)
            self.task = asyncio.create_task(follower.run())
            try:
                yield self
            finally:
                await self.kill()
                await self.relays.close()


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
    server = await start([Service(SERVICE, add_weight_service, trainer)], ServerConfig(), Health())
    async with AsyncExitStack() as stack:
        yield Fleet(trainer, server, stack)
    await server.stop(0)


def size(manifest: pb.WeightManifest) -> int:
    return int(manifest.payload_bytes)


async def test_the_trainer_sends_a_version_once_however_many_replicas_follow(fleet: Fleet) -> None:
    await fleet.add(7)
    full = await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    assert fleet.trainer.streams == 1 and fleet.trainer.sent < 1.01 * size(full)
    digests = {replica.engine.served.digest for replica in fleet.replicas if replica.engine.served}
    assert digests == {full.digest}
    assert all(one.holdings.store.get("r", 0).manifest.digest == full.digest for one in fleet.replicas)


async def test_deltas_spread_the_same_way(fleet: Fleet) -> None:
    await fleet.add(5)
    await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    fleet.trainer.sent = 0
    full = await fleet.publish(1, tensors(1, changed=4000))
    await fleet.serve(1)
    assert fleet.trainer.sent < 0.01 * size(full), "one delta"
    held = fleet.replicas[4].holdings.store.get("r", 1)
    assert bytes(held.tensors["w"].data) == bytes(tensors(1, changed=4000)["w"].data)


async def test_a_replica_that_joins_late_fetches_from_the_others(fleet: Fleet) -> None:
    await fleet.add(2)
    await fleet.publish(3, tensors(1))
    await fleet.serve(3)
    sent = fleet.trainer.sent
    await fleet.add(2)
    await fleet.serve(3)
    assert fleet.trainer.sent == sent


async def test_bytes_pass_through_before_a_relay_has_them_all(fleet: Fleet) -> None:
    await fleet.add(3)
    fleet.trainer.gate.clear()
    fleet.trainer.gate_at = (CHUNKS - 3) * CHUNK_BYTES
    await fleet.publish(0, tensors(1))
    came = [0, 0, 0]

    def passed() -> bool:
        for place, replica in enumerate(fleet.replicas):
            under_way = replica.holdings._arrival
            came[place] = under_way._verified if under_way else 0
        return min(came) >= (CHUNKS - 4) * CHUNK_BYTES

    await until(passed)
    assert all(replica.version is None for replica in fleet.replicas)
    # Longer than a silent relay is waited for: signs of life keep the readers.
    await asyncio.sleep(1.2 * sources.SILENT_SECONDS)
    fleet.trainer.gate.set()
    await fleet.serve(0)
    assert fleet.trainer.streams == 1


async def test_invariant_3_what_was_not_verified_whole_is_never_complete(fleet: Fleet) -> None:
    """Every chunk is sound, but not one of the manifest's: no relay closes its stream or holds it."""
    await fleet.add(3)
    await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    fleet.trainer.lies = True
    await fleet.publish(1, tensors(2))
    await until(lambda: all(replica.refused for replica in fleet.replicas))
    for replica in fleet.replicas:
        latest = replica.holdings.store.latest("r")
        assert latest and latest.number == 0 and replica.version == 0
        why = replica.refused[0]
        assert "what its publisher declared" in why or "gave version 1 up" in why
    fleet.trainer.lies = False
    await fleet.serve(1)


async def test_a_relay_that_is_killed_costs_the_trainer_only_what_was_missing(fleet: Fleet) -> None:
    await fleet.add(6)
    fleet.trainer.gate.clear()
    fleet.trainer.gate_at = CHUNKS // 2 * CHUNK_BYTES
    full = await fleet.publish(0, tensors(1))
    await until(lambda: fleet.trainer.sent >= fleet.trainer.gate_at)
    await asyncio.sleep(0.2)
    await fleet.replicas[0].kill()
    fleet.trainer.gate.set()
    await fleet.serve(0, fleet.replicas[1:])
    assert fleet.trainer.sent < size(full) + CHUNKS // 2 * CHUNK_BYTES + 3 * CHUNK_BYTES
    # Its children changed places: one of them went on at its offset, the other fetches from that one.
    assert fleet.trainer.streams == 2


async def test_a_relay_that_freezes_is_gone_round_and_not_waited_for_again(fleet: Fleet) -> None:
    await fleet.add(4)

    asked = 0

    async def silence(*_: object) -> None:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()

    fleet.replicas[0].holdings.arrival = silence  # type: ignore[method-assign, assignment]
    full = await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    assert fleet.trainer.sent < 2.1 * size(full), "the frozen one's fetch, and that of one of its children"
    assert asked == 2
    await fleet.publish(1, tensors(2))
    await fleet.serve(1)
    assert asked == 2


async def test_a_relay_that_is_slow_is_gone_round(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SLOW_SECONDS", 1.0)
    monkeypatch.setattr(sources, "SLOW_BYTES_PER_SECOND", 8 * CHUNK_BYTES)
    await fleet.add(2)
    slow = fleet.replicas[0]
    real = slow.holdings.arrival

    async def trickling(*asked: Any) -> Any:
        arrival = await real(*asked)
        chunks = arrival.encoded_chunks

        async def slowly(offset: int) -> AsyncIterator[bytes]:
            async for frame in chunks(offset):
                await asyncio.sleep(0.3)
                yield frame

        arrival.encoded_chunks = slowly
        return arrival

    monkeypatch.setattr(slow.holdings, "arrival", trickling)
    full = await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    assert fleet.trainer.streams == 2
    assert fleet.trainer.sent < 2 * size(full), "what the slow one had sent was not sent again"


async def test_what_the_engine_refuses_is_fetched_once(fleet: Fleet) -> None:
    await fleet.add(1)
    tries = 0

    async def refuse(tensors: Mapping[str, Tensor]) -> Any:
        nonlocal tries
        tries += 1
        raise QuartetError("INVALID_REQUEST", "another model's", field="tensors")

    fleet.replicas[0].engine.stage = refuse  # type: ignore[method-assign]
    await fleet.publish(0, tensors(1))
    await until(lambda: tries > 3)
    assert fleet.trainer.streams == 1 and "another model's" in fleet.replicas[0].refused[-1]


async def test_a_relay_that_is_still_busy_is_waited_for(fleet: Fleet) -> None:
    """It lives, and is about to fetch the version: asking the trainer instead would not scale."""
    await fleet.add(3)
    await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    busy = fleet.replicas[0].engine
    busy.staging.clear()
    await fleet.publish(1, tensors(2))
    await fleet.serve(1, fleet.replicas[1:])
    streams = fleet.trainer.streams
    await fleet.publish(2, tensors(3))
    await asyncio.sleep(1.2 * sources.SILENT_SECONDS)
    assert fleet.trainer.streams == streams and fleet.replicas[1].version == 1
    busy.staging.set()
    await fleet.serve(2)
    assert fleet.trainer.streams == streams + 1


async def test_a_relay_that_is_always_about_to_begin_is_gone_round(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that wait for each other say just that, for ever."""
    monkeypatch.setattr(sources, "BEGIN_SECONDS", (0.5, 1.0))
    await fleet.add(3)

    async def never(*_: object) -> None:
        await asyncio.sleep(0.1)
        raise QuartetError("NOT_READY", "about to")

    monkeypatch.setattr(fleet.replicas[0].holdings, "arrival", never)
    await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    assert fleet.trainer.streams == 2


async def test_a_version_that_a_relay_passes_over_is_given_up_below_it_too(fleet: Fleet) -> None:
    await fleet.add(2)
    await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    fleet.replicas[0].engine.staging.clear()
    await fleet.publish(1, tensors(2))
    await fleet.serve(1, fleet.replicas[1:])
    await fleet.publish(2, tensors(3))
    await asyncio.sleep(0.2)
    await fleet.publish(3, tensors(4))
    await until(lambda: fleet.replicas[0].holdings._expected == ("r", 3))
    fleet.replicas[0].engine.staging.set()
    await fleet.serve(3)
    assert fleet.trainer.streams == 3, "version 2 was never sent"


async def test_a_relay_that_lies_about_a_version_is_not_believed(fleet: Fleet) -> None:
    await fleet.add(2)
    liar = fleet.replicas[0]
    real = await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    await asyncio.to_thread(liar.holdings.store.publish, "r", 1, tensors(9))
    liar.task.cancel()
    told = await fleet.publish(1, tensors(2))
    assert told.digest != real.digest
    await fleet.serve(1, fleet.replicas[1:])
    assert fleet.replicas[1].engine.served == ServedWeights("r", 1, told.digest)


async def test_a_restarted_trainer_is_followed_by_a_new_tree(fleet: Fleet) -> None:
    await fleet.add(5)
    fleet.trainer.gate.clear()
    fleet.trainer.gate_at = CHUNKS // 2 * CHUNK_BYTES
    await fleet.publish(0, tensors(1))
    await until(lambda: fleet.trainer.sent >= fleet.trainer.gate_at)
    address = fleet.server.address
    await fleet.server.stop(0)
    await asyncio.sleep(0.5)
    again = Trainer(WeightStore(keep=2))
    full = await asyncio.to_thread(again.store.publish, "r", 0, tensors(1))
    server = await start(
        [Service(SERVICE, add_weight_service, again)], ServerConfig(address=address), Health()
    )
    try:
        await fleet.serve(0)
        assert again.sent < 1.2 * size(full), f"{again.streams} streams"
    finally:
        await server.stop(0)


async def test_the_same_bytes_come_from_a_relay_and_from_the_trainer(fleet: Fleet) -> None:
    """A fetch may begin at one and go on at the other."""
    await fleet.add(1)
    await fleet.publish(0, tensors(1))
    await fleet.publish(1, tensors(1, changed=999))
    await fleet.serve(1)
    fetched = []
    for address in (fleet.server.address, fleet.replicas[0].server.address):
        async with connect(address, bulk=True) as channel:
            fetched.append(await fetch_version(channel, "r", 1))
    assert fetched[0].manifest == fetched[1].manifest
    assert bytes(fetched[0].tensors["w"].data) == bytes(fetched[1].tensors["w"].data)


@pytest.mark.parametrize(
    ("advertised", "bound", "address"),
    [
        ("", "127.0.0.1:7", "127.0.0.1:7"),
        ("a.b:9", "0.0.0.0:7", "a.b:9"),
        ("", "unix:/tmp/x", "unix:/tmp/x"),
        ("", "10.1.2.3:7", "10.1.2.3:7"),
    ],
)
def test_addresses_that_others_can_dial(advertised: str, bound: str, address: str) -> None:
    assert relay_address(advertised, bound) == address


@pytest.mark.parametrize("bound", ["0.0.0.0:7", "[::]:7"])
def test_an_address_of_every_interface_becomes_the_name_of_the_host(bound: str) -> None:
    host, _, port = relay_address("", bound).rpartition(":")
    assert port == "7" and host not in ("0.0.0.0", "[::]", "")


def test_a_relay_that_trickles_is_slow_and_one_that_says_why_is_waited_for_longer() -> None:
    pace = sources._Pace()
    for _ in range(9):
        pace.note(1.0, 100_000, False)
    with pytest.raises(QuartetError, match="900000 bytes"):
        pace.note(2.0, 0, False)
    starved = sources._Pace()
    for _ in range(50):
        starved.note(1.0, 40, True)
    starved.note(0.1, sources.SLOW_BYTES_PER_SECOND * 10, False)
    assert starved.waited_s == 0.0 and not starved.starved
