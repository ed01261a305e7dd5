"""Fetch over real gRPC on loopback, from a publisher that tears, damages and lies on cue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
from quartet.errors import QuartetError
from quartet.kit import call
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc
from quartet.weights import fetch, receipt
from quartet.weights.fetch import fetch_version, get_manifest
from quartet.weights.fetched import Fetched
from quartet.weights.layout import header_of
from quartet.weights.manifest import layout_signature, sealed, weights_digest
from quartet.weights.payload import CHUNK_BYTES
from quartet.weights.service import SERVICE, add_weight_service
from quartet.weights.store import Road
from quartet.weights.tensor import Tensor
from weight_plane import Fault, Plane, model, stub


def torn_after(chunks: int) -> Fault:
    def fault(frames: Iterator[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
        for _ in range(chunks):
            yield next(frames)
        raise QuartetError("NOT_READY", "the publisher goes away")

    return fault


def without_end(frames: Iterator[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
    return (frame for frame in frames if frame.WhichOneof("frame") == "chunk")


def damaged(*indices: int) -> Fault:
    def fault(frames: Iterator[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
        for index, frame in enumerate(frames):
            if index in indices:
                data = bytearray(frame.chunk.data)
                data[len(data) // 2] ^= 1
                frame.chunk.data = bytes(data)
            yield frame

    return fault


def rewritten(change: Callable[[pb.FetchResponse], None]) -> Fault:
    def fault(frames: Iterator[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
        for frame in frames:
            change(frame)
            yield frame

    return fault


def same(fetched: Fetched, tensors: dict[str, Tensor]) -> bool:
    return fetched.tensors == tensors


async def test_a_version_arrives_bit_equal(plane: Plane) -> None:
    manifest = plane.store.publish("r", 1, model())
    fetched = await plane.fetch()
    assert fetched.manifest == manifest and same(fetched, model())
    assert fetched.received_bytes == manifest.payload_bytes > 3 * CHUNK_BYTES
    assert plane.servicer.offsets == [0]
    assert all(
        isinstance(one.data, memoryview) and one.data.obj is fetched.tensors["odd"].data.obj
        for one in fetched.tensors.values()
    )


async def test_both_registrations_serve_the_same_bytes_from_any_offset(plane: Plane) -> None:
    manifest = plane.store.publish("r", 1, model())
    plane.store.get("r", 1).payload.digests()  # so that no sign of life comes first
    server = await start([Service(SERVICE, add_weight_service, plane.servicer)], ServerConfig(), Health())
    fast = connect(server.address, bulk=True)
    for offset in (0, 1, CHUNK_BYTES, manifest.payload_bytes - 1, manifest.payload_bytes):
        request = pb.FetchRequest(run_id="r", version=1, offset=offset)
        frames = [
            [frame async for frame in stub(channel).Fetch(request)] for channel in (fast, plane.channel)
        ]
        assert frames[0] == frames[1]
    assert same(await fetch_version(fast, "r", 1), model())
    with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
        await fetch_version(fast, "x", 1)
    await fast.close()
    await server.stop(0)


async def test_the_newest_version_of_the_run_opened_last_needs_no_names(plane: Plane) -> None:
    plane.store.publish("r", 1, model(1))
    plane.store.publish("r", 2, model(2))
    fetched = await plane.fetch("", None)
    assert (fetched.manifest.run_id, fetched.manifest.version) == ("r", 2) and same(fetched, model(2))


async def test_models_of_235b_parameters_are_fetched_and_none_is_without_a_bound(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = plane.store.publish("r", 1, {"w": model()["odd"]})
    (info,) = manifest.tensors
    for rows, refused in ((235_000_000, False), (1_100_000_000, True)):
        info.dtype, info.shape[:] = "BF16", [rows, 1000]
        _, _, manifest.payload_bytes = header_of({"w": ("BF16", (rows, 1000))})
        manifest.digest = weights_digest(manifest.tensors)
        manifest.layout_signature = layout_signature(manifest.tensors)
        road = Road(sealed(manifest), plane.store.get("r", 1).payload)
        monkeypatch.setattr(plane.store, "road_at_hand", lambda *_, road=road: road)
        if refused:
            with pytest.raises(QuartetError, match="OVERLOADED: a payload of 2200000"):
                await get_manifest(plane.channel, "r", 1)
        else:
            assert (await get_manifest(plane.channel, "r", 1)).payload_bytes > 470e9


async def test_a_model_without_tensors_arrives(plane: Plane) -> None:
    plane.store.publish("r", 1, {})
    assert (await plane.fetch()).tensors == {}


async def test_a_torn_stream_goes_on_at_the_first_missing_byte(plane: Plane) -> None:
    plane.store.publish("r", 1, model())
    plane.servicer.faults = [torn_after(2), torn_after(1), without_end]
    fetched = await plane.fetch()
    assert same(fetched, model())
    assert plane.servicer.offsets == [0, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES, fetched.received_bytes]


async def test_a_frozen_publisher_is_given_up_and_the_next_stream_goes_on(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7."""
    monkeypatch.setattr(fetch, "FETCH_IDLE_SECONDS", 1.0)  # a busy machine takes its time over a chunk
    plane.store.publish("r", 1, model())
    plane.servicer.frozen_after = 2
    assert same(await asyncio.wait_for(plane.fetch(), 30), model())
    assert plane.servicer.offsets == [0, 2 * CHUNK_BYTES]


@asynccontextmanager
async def narrow(host: str, port: int, bytes_per_second: float) -> AsyncIterator[str]:
    """The address of a way there over which answers come so slowly, and no slower."""
    loop = asyncio.get_running_loop()

    async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def carried(caller: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        answers, there = await asyncio.open_connection(host, port)
        asking = loop.create_task(asked(caller, there))
        free_at = loop.time()
        with suppress(OSError):
            while data := await answers.read(1 << 16):
                free_at = max(free_at, loop.time()) + len(data) / bytes_per_second
                await asyncio.sleep(free_at - loop.time())
                back.write(data)
                await back.drain()
        back.close()
        await asking

    async with await asyncio.start_server(carried, "127.0.0.1", 0) as way:
        yield f"127.0.0.1:{way.sockets[0].getsockname()[1]}"


async def test_a_narrow_way_takes_its_time_and_no_tear(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bounded is the silence between two chunks, not the fetch: 1 GB by 1 MB/s are 17 minutes."""
    monkeypatch.setattr(fetch, "FETCH_IDLE_SECONDS", 2.5)
    megabytes = 14
    plane.store.publish("r", 1, {"w": Tensor("U8", (megabytes * 1000**2,), bytes(megabytes * 1000**2))})
    offered = Service(SERVICE, rpc.add_WeightServiceServicer_to_server, plane.servicer)
    server = await start([offered], ServerConfig(), Health())
    host, _, port = server.address.rpartition(":")
    began = time.monotonic()
    try:
        async with narrow(host, int(port), 4e6) as address, connect(address, bulk=True) as channel:
            fetched = await asyncio.wait_for(fetch_version(channel, "r", 1), 30)
    finally:
        await server.stop(0)
    assert time.monotonic() - began > fetch.FETCH_IDLE_SECONDS
    assert same(fetched, plane.store.get("r", 1).tensors) and plane.servicer.offsets == [0]


async def test_a_cancelled_fetch_ends_its_stream(plane: Plane) -> None:
    plane.store.publish("r", 1, model())
    plane.servicer.frozen_after = 1
    fetching = asyncio.create_task(plane.fetch())
    await asyncio.wait_for(plane.servicer.frozen.wait(), 30)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    await asyncio.wait_for(plane.servicer.ended.wait(), 30)


async def test_only_damaged_chunks_are_fetched_again(plane: Plane) -> None:
    plane.store.publish("r", 1, model())
    plane.servicer.faults = [damaged(0, 2), damaged(0)]
    assert same(await plane.fetch(), model())
    assert plane.servicer.offsets == [0, 0, 0, 2 * CHUNK_BYTES]


async def test_a_chunk_that_stays_damaged_ends_the_fetch(plane: Plane) -> None:
    plane.store.publish("r", 1, model())
    plane.servicer.faults = [damaged(1), *[damaged(0)] * 100]
    with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH: chunk at 1048576"):
        await plane.fetch()
    assert plane.servicer.offsets == [0] + [CHUNK_BYTES] * receipt.MAX_REFETCHES


async def test_damaged_chunks_are_bounded_in_all(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipt, "MAX_DAMAGED", 2)
    plane.store.publish("r", 1, model())
    plane.servicer.faults = [damaged(0, 1), damaged(1)]
    with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH: chunk at 1048576, 2 times over, 3 in all"):
        await plane.fetch()
    assert plane.servicer.offsets == [0, 0]


async def test_tears_without_progress_are_bounded(plane: Plane) -> None:
    plane.store.publish("r", 1, model())
    plane.servicer.faults = [torn_after(0)] * 100
    with pytest.raises(QuartetError, match="NOT_READY"):
        await plane.fetch()
    assert len(plane.servicer.offsets) == fetch.MAX_BARREN_TRIES


def _end(size: int, digest: bytes = b"") -> Fault:
    def change(frame: pb.FetchResponse) -> None:
        if frame.WhichOneof("frame") == "end":
            frame.end.payload_bytes += size
            frame.end.payload_digest = digest or frame.end.payload_digest

    return rewritten(change)


def _early_end(frames: Iterator[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
    kept = list(frames)
    return iter([kept[0], kept[-1]])


def _skipping(frames: Iterator[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
    kept = list(frames)
    return iter(kept[:1] + kept[2:])


def _twice(frames: Iterator[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
    kept = list(frames)
    return iter(kept[:1] + kept)


def _no_data(frames: Iterator[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
    return iter([pb.FetchResponse(chunk=pb.WeightChunk())] * 3)


def _no_frame(frames: Iterator[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
    return iter([pb.FetchResponse()] * 3)


def _beyond_the_end(frames: Iterator[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
    for frame in frames:
        if frame.WhichOneof("frame") == "chunk" and len(frame.chunk.data) < CHUNK_BYTES:
            frame.chunk.data += b"x"
        yield frame


@pytest.mark.parametrize("lie", [_end(1), _end(-1), _no_data, _no_frame, _beyond_the_end])
async def test_a_stream_that_lies_is_never_accepted_and_mended_by_the_next(plane: Plane, lie: Fault) -> None:
    """Invariant 3."""
    plane.store.publish("r", 1, model())
    plane.servicer.faults = [lie]
    assert same(await plane.fetch(), model())
    plane.servicer.faults = [lie] * 100
    with pytest.raises(QuartetError, match=r"CHECKSUM_MISMATCH|NOT_READY"):
        await plane.fetch()


@pytest.mark.parametrize("lie", [_early_end, _skipping, _twice])
async def test_streams_that_begin_true_and_then_lie_are_used_as_far_as_they_are_true(
    plane: Plane, lie: Fault
) -> None:
    plane.store.publish("r", 1, model())
    plane.servicer.faults = [lie] * 100
    fetched = await plane.fetch()
    assert same(fetched, model())
    assert plane.servicer.offsets[:4] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES]


async def test_a_wrong_digest_of_the_whole_is_never_accepted(plane: Plane) -> None:
    """Invariant 3."""
    plane.store.publish("r", 1, model())
    plane.servicer.faults = [_end(0, bytes(16))]
    with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH"):
        await plane.fetch()


async def test_weights_changed_under_the_publisher_are_never_accepted(plane: Plane) -> None:
    array = np.zeros(100, np.float32)
    plane.store.publish("r", 1, {"w": Tensor("F32", (100,), array.data)})
    array[7] = 1.0
    with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH: tensor w"):
        await plane.fetch()


async def test_an_eviction_between_two_streams_is_told(plane: Plane) -> None:
    plane.store.publish("r", 1, model())

    def evicting(frames: Iterator[pb.FetchResponse]) -> Iterator[pb.FetchResponse]:
        yield next(frames)
        plane.store.publish("r", 2, model(2))
        plane.store.publish("r", 3, model(3))
        raise QuartetError("NOT_READY", "the publisher goes away")

    plane.servicer.faults = [evicting]
    with pytest.raises(QuartetError) as caught:
        await plane.fetch()
    assert caught.value.reason == "VERSION_UNKNOWN" and caught.value.metadata["latest"] == "3"


async def test_unknown_runs_versions_bases_and_offsets_have_typed_errors(plane: Plane) -> None:
    manifest = plane.store.publish("r", 1, model())
    for run_id, version, reason in (("x", 1, "RUN_UNKNOWN"), ("r", 2, "VERSION_UNKNOWN")):
        with pytest.raises(QuartetError, match=reason):
            await plane.fetch(run_id, version)
    past = pb.FetchRequest(run_id="r", version=1, offset=manifest.payload_bytes + 1)
    relative = pb.FetchRequest(run_id="r", version=1, base_version=0)
    for request, reason in ((past, "OFFSET_OUT_OF_RANGE"), (relative, "VERSION_UNKNOWN")):
        with pytest.raises(QuartetError, match=reason):
            async for _ in call.stream(stub(plane.channel).Fetch(request), idle_timeout_s=20):
                pass
    answer = await stub(plane.channel).GetManifest(
        pb.GetManifestRequest(run_id="r", base_version=0), timeout=5
    )
    assert answer.manifest == manifest and not answer.manifest.HasField("base_version")
