"""Push over real gRPC: committed whole or not at all, whatever the stream does."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import numpy as np
import pytest
import xxhash
from quartet.errors import QuartetError, from_rpc
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc
from quartet.weights import push
from quartet.weights.fetched import Fetched
from quartet.weights.frames import PUSH_CHUNK, encode_chunk
from quartet.weights.manifest import build_manifest, sealed
from quartet.weights.payload import CHUNK_BYTES, full_payload
from quartet.weights.push import PUSH_METHOD, push_version
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor


def model(seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (700, 512), "layer": (512, 512), "norm": (512,), "scalar": ()}
    return {
        name: Tensor("F32", shape, np.asarray(rng.random(shape, np.float32)).data)
        for name, shape in shapes.items()
    }


def frames(version: int = 1, seed: int = 0) -> list[pb.PushRequest]:
    payload = full_payload(model(seed))
    chunks = [pb.PushRequest.FromString(one) for one in payload.encoded_chunks(0, PUSH_CHUNK)]
    manifest = build_manifest("r", version, model(seed))
    return [pb.PushRequest(manifest=manifest), *chunks, pb.PushRequest(commit=payload.end())]


async def serve(store: WeightStore, accept: bool = True, generated: bool = False) -> RunningServer:
    servicer = WeightServicer(store, accept_push=accept)
    register = rpc.add_WeightServiceServicer_to_server if generated else add_weight_service
    return await start([Service(SERVICE, register, servicer)], ServerConfig(), Health())


class Plane:
    """A replica that takes pushes, and a channel to it."""

    def __init__(self, store: WeightStore, address: str, channel: grpc.aio.Channel) -> None:
        self.store, self.address, self.channel = store, address, channel

    async def send(self, requests: Iterator[pb.PushRequest]) -> pb.PushResponse:
        """By a client that waits for nothing; grpc.aio's would lose statuses that come while it writes."""

        def blocking() -> pb.PushResponse:
            with grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
                stub = rpc.WeightServiceStub(channel)  # type: ignore[no-untyped-call]
                return stub.Push(requests, timeout=20)

        try:
            return await asyncio.to_thread(blocking)
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def versions(self) -> list[int]:
        run = self.store._runs.get("r")
        return sorted(run.versions) if run else []


@pytest.fixture
async def plane(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plane]:
    monkeypatch.setattr(push, "RETRY_SECONDS", 0.01)
    store = WeightStore(keep=2)
    server = await serve(store)
    channel = connect(server.address, bulk=True)
    yield Plane(store, server.address, channel)
    await channel.close()
    await server.stop(0)


async def test_a_pushed_version_is_held_as_it_was_sent(plane: Plane) -> None:
    canary = pb.Canary(token_ids=[1, 2], logprobs=[-1.5])
    made = await push_version(plane.channel, "r", 3, model(), canary=canary, adapter_config="{}")
    held = plane.store.get("r", 3)
    assert held.tensors == model() and held.manifest == made.manifest
    assert held.manifest.canary == canary and held.manifest.adapter_config == "{}"
    # Again: accepted at once, and nothing changes.
    await push_version(plane.channel, "r", 3, model(), canary=canary, adapter_config="{}")
    assert plane.store.get("r", 3) is held


async def test_neither_event_loop_hashes_what_passes(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """What push.py promises under 6; both loops are this test's."""
    hashing: set[int] = set()

    def noted(function: Callable[..., object]) -> Callable[..., object]:
        def note(*data: bytes) -> object:
            if not data or len(data[0]) > 4096:  # a state, or more than a manifest
                hashing.add(threading.get_ident())
            return function(*data)

        return note

    for name in ("xxh3_64", "xxh3_64_intdigest", "xxh3_128_digest"):
        monkeypatch.setattr(xxhash, name, noted(getattr(xxhash, name)))
    first = await push_version(plane.channel, "r", 1, model())
    await push_version(plane.channel, "r", 2, model(1), base=first)
    assert hashing and threading.get_ident() not in hashing


async def test_the_next_version_is_pushed_as_a_delta_or_whole_where_its_base_is_gone(plane: Plane) -> None:
    first = await push_version(plane.channel, "r", 1, model())
    changed = model() | {"norm": model(1)["norm"]}
    second = await push_version(plane.channel, "r", 2, changed, base=first)
    assert plane.store.get("r", 2).tensors == changed
    assert plane.store.get("r", 2).manifest == second.manifest
    # The delta that came is handed on as it is.
    base = (1, bytes(first.manifest.digest))
    assert plane.store.payload("r", 2, base).size < 10_000
    lost = Fetched(build_manifest("r", 0, model(5)), model(5))
    await push_version(plane.channel, "r", 3, model(3), base=lost)
    assert plane.store.get("r", 3).tensors == model(3)


async def test_other_weights_under_a_committed_number_are_refused(plane: Plane) -> None:
    await push_version(plane.channel, "r", 1, model())
    with pytest.raises(QuartetError, match="SEQUENCE_CONFLICT"):
        await push_version(plane.channel, "r", 1, model(1))
    assert plane.store.get("r", 1).tensors == model()


async def test_whoever_takes_no_pushes_says_so() -> None:
    for generated in (False, True):
        server = await serve(WeightStore(keep=1), accept=False, generated=generated)
        async with connect(server.address, bulk=True) as channel:
            with pytest.raises(QuartetError, match="NOT_IMPLEMENTED"):
                await push_version(channel, "r", 1, model())
        await server.stop(0)


async def test_the_generated_registration_takes_the_same_streams() -> None:
    store = WeightStore(keep=1)
    server = await serve(store, generated=True)
    async with connect(server.address, bulk=True) as channel:
        await push_version(channel, "r", 1, model())
    assert store.get("r", 1).tensors == model()
    await server.stop(0)


def _without_commit(sent: list[pb.PushRequest]) -> None:
    sent.pop()


def _truncated(sent: list[pb.PushRequest]) -> None:
    del sent[2:]


def _nothing(sent: list[pb.PushRequest]) -> None:
    sent.clear()


def _early_commit(sent: list[pb.PushRequest]) -> None:
    del sent[2:-1]


def _swapped(sent: list[pb.PushRequest]) -> None:
    sent[1], sent[2] = sent[2], sent[1]


def _twice(sent: list[pb.PushRequest]) -> None:
    sent.insert(1, sent[1])


def _two_manifests(sent: list[pb.PushRequest]) -> None:
    sent.insert(2, sent[0])


def _no_manifest(sent: list[pb.PushRequest]) -> None:
    sent.pop(0)


def _no_frame(sent: list[pb.PushRequest]) -> None:
    sent.insert(1, pb.PushRequest())


def _no_run(sent: list[pb.PushRequest]) -> None:
    sent[0].manifest.run_id = ""
    sealed(sent[0].manifest)


def _another_version(sent: list[pb.PushRequest]) -> None:
    sent[0].manifest.version = 2


def _flipped(sent: list[pb.PushRequest]) -> None:
    data = bytearray(sent[2].chunk.data)
    data[5] ^= 4
    sent[2].chunk.data = bytes(data)


def _other_tensor(sent: list[pb.PushRequest]) -> None:
    other = frames(seed=1)
    sent[1:] = other[1:]


def _lying_manifest(sent: list[pb.PushRequest]) -> None:
    sent[0].manifest.tensors[0].digest ^= 1


def _wrong_commit(sent: list[pb.PushRequest]) -> None:
    sent[-1].commit.payload_digest = bytes(16)


def _unknown_base(sent: list[pb.PushRequest]) -> None:
    sent[0].manifest.base_version = 7
    sent[0].manifest.base_digest = bytes(16)
    sealed(sent[0].manifest)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_without_commit, "STREAM_TORN"),
        (_truncated, "STREAM_TORN"),
        (_nothing, "STREAM_TORN"),
        (_early_commit, "CHECKSUM_MISMATCH"),
        (_swapped, "CHECKSUM_MISMATCH"),
        (_twice, "CHECKSUM_MISMATCH"),
        (_flipped, "CHECKSUM_MISMATCH"),
        (_other_tensor, "CHECKSUM_MISMATCH"),
        (_lying_manifest, "CHECKSUM_MISMATCH"),
        (_wrong_commit, "CHECKSUM_MISMATCH"),
        (_another_version, "CHECKSUM_MISMATCH"),
        (_two_manifests, "INVALID_REQUEST"),
        (_no_manifest, "INVALID_REQUEST"),
        (_no_frame, "INVALID_REQUEST"),
        (_no_run, "INVALID_REQUEST"),
        (_unknown_base, "RUN_UNKNOWN"),
    ],
)
async def test_a_stream_that_is_not_whole_commits_nothing(
    plane: Plane, damage: Callable[[list[pb.PushRequest]], None], reason: str
) -> None:
    """Invariant 3."""
    sent = frames()
    assert len(sent) >= 4
    damage(sent)
    with pytest.raises(QuartetError) as caught:
        await plane.send(iter(sent))
    assert caught.value.reason == reason
    assert plane.versions() == []
    await plane.send(iter(frames()))
    assert plane.store.get("r", 1).tensors == model()


async def _push_and_hang(address: str) -> None:
    async def messages() -> AsyncIterator[bytes]:
        for request in frames()[:-1]:
            yield request.SerializeToString()
        print("sent", flush=True)
        await asyncio.sleep(60)

    async with connect(address, bulk=True) as channel:
        await channel.stream_unary(PUSH_METHOD)(messages())


async def test_a_killed_client_commits_nothing(plane: Plane) -> None:
    """Invariant 9: to the server its stream ends like any other."""
    server = await serve(plane.store)
    command = [sys.executable, __file__, server.address]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"sent\n"
    process.kill()
    await process.wait()
    await asyncio.sleep(0.3)
    assert plane.versions() == []
    await server.stop(0)


async def test_a_silent_client_is_given_up(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7."""
    monkeypatch.setattr(push, "IDLE_SECONDS", 0.1)
    method = plane.channel.stream_unary(PUSH_METHOD)

    async def messages() -> AsyncIterator[bytes]:
        for request in frames()[:2]:
            yield request.SerializeToString()
        await asyncio.sleep(30)

    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.wait_for(method(messages()), 10)
    assert from_rpc(caught.value).reason == "DEADLINE" and plane.versions() == []


async def test_an_upload_that_trickles_is_given_up(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariants 7 and 8: a frame now and then is no progress worth a place."""
    monkeypatch.setattr(push, "PUSH_SECONDS", 0.3)
    monkeypatch.setattr(push, "MAX_PUSHES", 1)
    method = plane.channel.stream_unary(PUSH_METHOD)
    payload = full_payload(model())

    async def messages() -> AsyncIterator[bytes]:
        yield frames()[0].SerializeToString()
        for at in range(1000):
            byte = b"".join(payload.slices(at, at + 1))
            checksum = xxhash.xxh3_64_intdigest(byte)
            yield encode_chunk(at, [byte], 1, checksum, PUSH_CHUNK)
            await asyncio.sleep(0.05)

    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.wait_for(method(messages()), 20)
    assert from_rpc(caught.value).reason == "DEADLINE" and plane.versions() == []
    monkeypatch.setattr(push, "PUSH_SECONDS", 20.0)
    await push_version(plane.channel, "r", 1, model())
    assert plane.versions() == [1], "its place was given back"


async def test_staging_is_bounded_and_given_back(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 8."""
    size = build_manifest("r", 1, model()).payload_bytes
    monkeypatch.setattr(push, "MAX_STAGED_BYTES", size - 1)
    monkeypatch.setattr(push, "MAX_TRIES", 1)
    with pytest.raises(QuartetError, match="OVERLOADED"):
        await push_version(plane.channel, "r", 1, model())
    monkeypatch.setattr(push, "MAX_STAGED_BYTES", size)
    for _ in range(3):
        sent = frames()[:-1]
        with pytest.raises(QuartetError, match="STREAM_TORN"):
            await plane.send(iter(sent))
    await push_version(plane.channel, "r", 1, model())


async def test_uploads_at_once_are_bounded(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 8."""
    monkeypatch.setattr(push, "MAX_PUSHES", 1)
    monkeypatch.setattr(push, "MAX_TRIES", 1)
    method = plane.channel.stream_unary(PUSH_METHOD)
    begun, rest = asyncio.Event(), asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        for index, request in enumerate(frames()):
            if index == 3:
                begun.set()
                await rest.wait()
            yield request.SerializeToString()

    first = asyncio.ensure_future(method(messages(), timeout=20))
    await asyncio.wait_for(begun.wait(), 5)
    await asyncio.sleep(0.1)
    with pytest.raises(QuartetError, match="OVERLOADED"):
        await push_version(plane.channel, "r", 2, model(2))
    rest.set()
    await first
    await push_version(plane.channel, "r", 2, model(2))
    assert plane.versions() == [1, 2]


async def test_a_push_goes_on_when_the_server_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "RETRY_SECONDS", 0.3)
    store = WeightStore(keep=1)
    gone = await serve(store)
    address = gone.address
    await gone.stop(0)
    async with connect(address, bulk=True) as channel:
        pushing = asyncio.create_task(push_version(channel, "r", 1, model()))
        await asyncio.sleep(0.2)
        servicer = WeightServicer(store, accept_push=True)
        offered = Service(SERVICE, add_weight_service, servicer)
        server = await start([offered], ServerConfig(address=address), Health())
        await asyncio.wait_for(pushing, 20)
    assert store.get("r", 1).tensors == model()
    await server.stop(0)


def test_a_model_is_several_chunks() -> None:
    assert full_payload(model()).size > 2 * CHUNK_BYTES


if __name__ == "__main__":
    asyncio.run(_push_and_hang(sys.argv[1]))
