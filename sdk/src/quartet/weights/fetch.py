"""Pulling a version: every byte checked before anything is returned, resumed where it tore, bounded in tries.

1. `fetch_version` returns a whole, verified version or raises; nothing in between can be observed.
2. A torn stream resumes at the first byte that is missing; a damaged chunk is fetched again alone.
3. Tries are bounded: MAX_BARREN_TRIES streams in a row that bring nothing, MAX_REFETCHES of one chunk; then
   the error is raised.
4. The payload is received into one buffer and the tensors are views of it: a model is in memory once.
5. Hashing whole payloads happens in a thread; the event loop sees one chunk at a time.
6. `watch` reconnects for ever, but never waits for ever: a stream without a sign of life is given up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import structlog
import xxhash

from quartet.errors import QuartetError
from quartet.kit.call import RetryBudget, stream, unary
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc
from quartet.weights.arrival import Arrival
from quartet.weights.frames import Chunk, decode_frame
from quartet.weights.manifest import check_manifest, mismatch
from quartet.weights.payload import CHUNK_BYTES, decode_payload
from quartet.weights.service import SERVICE
from quartet.weights.tensor import Tensor

log = structlog.get_logger(__name__)

FETCH_METHOD = f"/{SERVICE}/Fetch"

#: A reader refuses to allocate more: beyond it weights do not belong on gRPC (docs/design.md §3).
MAX_PAYLOAD_BYTES = 256 << 30
#: A manifest is small and in memory; this is for a publisher whose process is busy, not for its work.
MANIFEST_TIMEOUT_SECONDS = 30.0
#: Chunks follow each other at once; a publisher that sends none for so long is frozen or gone.
FETCH_IDLE_SECONDS = 30.0
#: Three heartbeats missed, and some.
WATCH_IDLE_SECONDS = 20.0
#: Streams in a row that bring no new byte before a fetch fails.
MAX_BARREN_TRIES = 6
#: Times one span is fetched again because its bytes were damaged.
MAX_REFETCHES = 3
#: Full jitter below a bound that doubles from the first to the second.
BACKOFF_SECONDS = (0.1, 5.0)
#: What another try may mend. The rest says that the request itself is wrong, or the version gone.
PASSING = frozenset({"NOT_READY", "OVERLOADED", "DEADLINE", "INTERNAL", "CHECKSUM_MISMATCH"})
#: What no waiting mends, where a watcher may wait for a run that its publisher does not know yet.
PERMANENT = frozenset({"NOT_IMPLEMENTED", "UNAUTHENTICATED", "INVALID_REQUEST"})


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified version; the tensors are views of `payload`."""

    manifest: pb.WeightManifest
    tensors: dict[str, Tensor]
    payload: memoryview


@dataclass(slots=True)
class _Receipt:
    """What has arrived of a payload."""

    buffer: memoryview
    missing: list[tuple[int, int]]
    arrival: Arrival
    end: pb.WeightEnd | None = None
    refetches: dict[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.buffer)

    @property
    def complete(self) -> bool:
        return not self.missing and self.end is not None

    @property
    def exhausted(self) -> bool:
        return any(count > MAX_REFETCHES for count in self.refetches.values())

    def wants(self, position: int) -> bool:
        """Whether a stream at this position has news: missing bytes, or WeightEnd after all bytes."""
        return position == self.size or any(begin <= position < end for begin, end in self.missing)

    def accept(self, chunk: Chunk, position: int) -> int:
        """Take the chunk that must lie at this position, return the next one; damaged bytes stay missing."""
        data = chunk.data
        if chunk.offset != position or not 0 < len(data) <= min(CHUNK_BYTES, self.size - position):
            raise mismatch(f"place of the chunk at {chunk.offset}")
        until = position + len(data)
        if xxhash.xxh3_64_intdigest(data) == chunk.checksum:
            self.buffer[position:until] = data
            self.missing = [span for old in self.missing for span in _without(old, position, until)]
            self.arrival.advance(self.missing[0][0] if self.missing else self.size)
            return until
        self.refetches[position] = self.refetches.get(position, 0) + 1
        if self.exhausted:
            raise mismatch(f"chunk at {position}, {self.refetches[position]} times over,")
        return until

    def accept_end(self, end: pb.WeightEnd, position: int) -> None:
        """Take WeightEnd, which is true only after the last byte."""
        if position != self.size or end.payload_bytes != self.size:
            raise mismatch("size of the payload in WeightEnd")
        self.end = end


def _without(span: tuple[int, int], begin: int, end: int) -> list[tuple[int, int]]:
    rest = [(span[0], min(span[1], begin)), (max(span[0], end), span[1])]
    return [(first, last) for first, last in rest if first < last]


async def fetch_version(
    channel: grpc.aio.Channel, run_id: str, version: int | None = None, *, arrival: Arrival | None = None
) -> Fetched:
    """Pull a version whole; None means the newest. Who holds `arrival` sees its bytes come.

    Errors: RUN_UNKNOWN, VERSION_UNKNOWN (also when it is evicted meanwhile), CHECKSUM_MISMATCH, NOT_READY.
    """
    manifest = await get_manifest(channel, run_id, version)
    size = manifest.payload_bytes
    # Unlike bytearray(size), untouched: the pages are first written by the bytes that arrive.
    arrival = arrival or Arrival()
    receipt = _Receipt(np.empty(size, np.uint8).data, [(0, size)], arrival)
    arrival.begin(manifest, receipt.buffer)
    barren = 0
    while not receipt.complete:
        before = (receipt.missing, receipt.end)
        try:
            await _receive(channel, manifest, receipt)
        except QuartetError as error:
            barren = barren + 1 if (receipt.missing, receipt.end) == before else 0
            if error.reason not in PASSING or receipt.exhausted or barren >= MAX_BARREN_TRIES:
                raise
            log.warning("fetch torn", run_id=manifest.run_id, version=manifest.version, why=error.message)
            await asyncio.sleep(_backoff_seconds(barren))
    tensors = await asyncio.to_thread(_verify, receipt, manifest)
    assert receipt.end is not None
    arrival.finish(receipt.end)
    return Fetched(manifest, tensors, receipt.buffer)


async def get_manifest(
    channel: grpc.aio.Channel, run_id: str, version: int | None = None
) -> pb.WeightManifest:
    """Ask for a manifest and refuse one that is not what was asked for or contradicts itself."""
    request = pb.GetManifestRequest(run_id=run_id, version=version)
    response = await unary(
        _stub(channel).GetManifest, request, timeout_s=MANIFEST_TIMEOUT_SECONDS, budget=RetryBudget()
    )
    manifest: pb.WeightManifest = response.manifest
    check_manifest(manifest)
    asked_for = run_id in ("", manifest.run_id) and version in (None, manifest.version)
    if not asked_for or manifest.HasField("base_version"):
        raise mismatch(f"manifest of version {version} of run {run_id}")
    if manifest.payload_bytes > MAX_PAYLOAD_BYTES:
        raise QuartetError(
            "OVERLOADED",
            f"a payload of {manifest.payload_bytes} bytes is over the bound of {MAX_PAYLOAD_BYTES}",
        )
    return manifest


async def _receive(channel: grpc.aio.Channel, manifest: pb.WeightManifest, receipt: _Receipt) -> None:
    """Run one stream from the first missing byte, for as long as it brings what is missing."""
    position = receipt.missing[0][0] if receipt.missing else receipt.size
    request = pb.FetchRequest(run_id=manifest.run_id, version=manifest.version, offset=position)
    # No deserializer: decode_frame reads the messages as they came.
    method = channel.unary_stream(FETCH_METHOD, request_serializer=pb.FetchRequest.SerializeToString)
    call = method(request)
    try:
        async for message in stream(call, idle_timeout_s=FETCH_IDLE_SECONDS):
            frame = decode_frame(message)
            if frame is None:
                raise mismatch(f"frame at byte {position}")
            if isinstance(frame, pb.WeightEnd):
                return receipt.accept_end(frame, position)
            position = receipt.accept(frame, position)
            if not receipt.wants(position):
                return None
        raise QuartetError("NOT_READY", f"the stream of version {manifest.version} tore at byte {position}")
    finally:
        call.cancel()


def _verify(receipt: _Receipt, manifest: pb.WeightManifest) -> dict[str, Tensor]:
    assert receipt.end is not None
    tensors = decode_payload(receipt.buffer, manifest)
    if xxhash.xxh3_128_digest(receipt.buffer) != receipt.end.payload_digest:
        raise mismatch("payload")
    return tensors


def _stub(channel: grpc.aio.Channel) -> Any:
    stub: Any = rpc.WeightServiceStub(channel)  # type: ignore[no-untyped-call]
    return stub


def _backoff_seconds(tries: int) -> float:
    first, last = BACKOFF_SECONDS
    return random.uniform(0, min(last, first * 2**tries))


async def watch(
    channel: grpc.aio.Channel, run_id: str, held: int | None, relay_address: str = ""
) -> AsyncGenerator[pb.VersionAnnounced, None]:
    """Yield what is newest at the publisher when it changes, for ever; at first only if newer than `held`.

    A caller with a `relay_address` is told to others as a source of what it is told.

    After a reconnection anything but what was told last is told, a lower number too: the publisher may have
    gone back to a saved state, or, for an empty run_id, to another run. An unknown run is waited for.
    Errors: NOT_IMPLEMENTED, UNAUTHENTICATED, INVALID_REQUEST.
    """
    told: pb.VersionAnnounced | None = None
    failures = 0
    while True:
        # Once something was told it is compared here, by digest too, which a number cannot do.
        request = pb.WatchRequest(
            run_id=run_id, held_version=None if told else held, relay_address=relay_address
        )
        call = _stub(channel).Watch(request)
        try:
            async for response in stream(call, idle_timeout_s=WATCH_IDLE_SECONDS):
                failures = 0
                if response.WhichOneof("event") == "announced" and response.announced != told:
                    told = response.announced
                    yield response.announced
        except QuartetError as error:
            if error.reason in PERMANENT:
                raise
            log.info("watch lost", run_id=run_id, why=error.message, failures=failures)
        finally:
            call.cancel()
        failures += 1
        await asyncio.sleep(_backoff_seconds(min(failures, 10)))
