"""Pulling a version: every byte checked before anything is returned, resumed where it tore, bounded in tries.

1. `fetch_version` returns a whole, verified version or raises; nothing in between can be observed.
2. A torn stream resumes at the first byte that is missing; a damaged chunk is fetched again alone.
3. Tries are bounded: MAX_BARREN_TRIES streams in a row that bring nothing, MAX_REFETCHES of one chunk,
   MAX_DAMAGED of all; then the error is raised.
4. A full payload is received into one buffer and the tensors are views of it: a model is in memory once.
5. With a base, deltas are asked for and applied, one after the other where the publisher answers with a
   chain. What results is bit-equal to a full payload; a delta that does not lead there is replaced by one.
6. Hashing and decoding whole payloads, and going through the tensors of a manifest, happens in a thread; the
   event loop sees one chunk at a time.
7. `watch` reconnects for ever, but never waits for ever: a stream without a sign of life is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from quartet.errors import QuartetError
from quartet.kit.backoff import pause_s
from quartet.kit.call import RetryBudget, stream, unary
from quartet.kit.own_log import get_logger
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc
from quartet.weights import pages
from quartet.weights.arrival import Arrival
from quartet.weights.delta import Delta, Held, apply_delta
from quartet.weights.fetched import Fetched
from quartet.weights.frames import decode_frame
from quartet.weights.manifest import check_manifest, mismatch, of_full_payload
from quartet.weights.passing import PassingDigests
from quartet.weights.payload import decode_payload
from quartet.weights.receipt import Receipt
from quartet.weights.service import SERVICE
from quartet.weights.tensor import Tensor
from quartet.weights.transport import Transport

log = get_logger()

FETCH_METHOD = f"/{SERVICE}/Fetch"

#: A reader refuses to allocate more, whatever a manifest says: a model of 1000B parameters in bfloat16.
MAX_PAYLOAD_BYTES = 2 << 40
#: A manifest is small and in memory; this is for a publisher whose process is busy, not for its work.
MANIFEST_TIMEOUT_SECONDS = 30.0
#: Making a delta or a copy takes a publisher seconds per GiB; it goes on while nobody waits, and is kept.
PREPARE_TIMEOUT_SECONDS = 180.0
#: Links of a chain of deltas: more than any publisher keeps (quartet.weights.versions).
MAX_LINKS = 100
#: Chunks follow each other at once; a publisher that sends none for so long is frozen or gone.
FETCH_IDLE_SECONDS = 30.0
#: Signs of life in a row from who waits for its own source, or hashes; one comes every second.
MAX_SIGNS = 120
#: Three heartbeats missed, and some.
WATCH_IDLE_SECONDS = 20.0
#: Streams in a row that bring no new byte before a fetch fails.
MAX_BARREN_TRIES = 6
#: What every failure doubles, and the longest pause.
BACKOFF_SECONDS = (0.1, 5.0)
#: What another try may mend. The rest says that the request itself is wrong, or the version gone.
PASSING = frozenset({"NOT_READY", "OVERLOADED", "DEADLINE", "INTERNAL", "CHECKSUM_MISMATCH"})
#: What no waiting mends, where a watcher may wait for a run that its publisher does not know yet.
PERMANENT = frozenset({"NOT_IMPLEMENTED", "UNAUTHENTICATED", "INVALID_REQUEST"})


async def fetch_version(
    channel: grpc.aio.Channel,
    run_id: str,
    version: int | None = None,
    base: Held | None = None,
    *,
    on_arrival: Callable[[Arrival], None] | None = None,
    transports: Sequence[Transport] = (),
) -> Fetched:
    """Pull a version whole; None means the newest. With a base the publisher may answer with deltas.

    `on_arrival` is told of each payload as it begins to come. The transports are tried in their order, before
    Fetch.
    Errors: RUN_UNKNOWN, VERSION_UNKNOWN (also when it is evicted meanwhile), CHECKSUM_MISMATCH, NOT_READY.
    """
    deltas: list[Delta] = []
    received = 0
    for _ in range(MAX_LINKS):
        answer = await _describe(channel, run_id, version, base, transports)
        manifest: pb.WeightManifest = answer.manifest
        buffer = await _carried(answer, transports)
        with _receipt(manifest, buffer, on_arrival) as receipt:
            if buffer is None:
                await _payload(channel, manifest, receipt)
            received += receipt.size
            try:
                tensors = await asyncio.to_thread(_decoded, receipt, manifest, base, on_arrival is not None)
            except QuartetError as error:
                if not manifest.HasField("base_version") and buffer is None:
                    raise
                # The bytes of a delta are as they were sent: it, or our base, is not what it claims to be.
                # Another road than Fetch has no checksums.
                log.warning("payload refused", run_id=run_id, version=manifest.version, why=error.message)
                base, deltas, transports = None, [], ()
                continue
            if receipt.end is not None:
                receipt.arrival.finish(receipt.end)
        if base is None or not manifest.HasField("base_version"):
            return Fetched(manifest, tensors, (), received)
        deltas.append(Delta(manifest, receipt.payload()))
        full = await asyncio.to_thread(of_full_payload, manifest)
        base = Fetched(full, tensors, tuple(deltas), received)
        if version in (None, manifest.version):
            return base
    raise mismatch(f"chain of deltas to version {version} (over {MAX_LINKS} links)")


def _decoded(
    receipt: Receipt, manifest: pb.WeightManifest, base: Held | None, passed_on: bool
) -> dict[str, Tensor]:
    is_delta = base is not None and manifest.HasField("base_version")
    # Who hands a payload on as it comes must know its digest; its reader knows every tensor's.
    if receipt.end is None and passed_on:
        receipt.close()
    if base is not None and is_delta:
        return apply_delta(receipt.buffer, manifest, base)
    return decode_payload(receipt.buffer, manifest, receipt.passing.found if receipt.passing else {})


async def _carried(answer: pb.GetManifestResponse, transports: Sequence[Transport]) -> memoryview | None:
    """The payload by the first transport that is open; None: it must be fetched."""
    for transport in transports:
        buffer = await transport.payload(answer)
        if buffer is not None:
            return buffer
    return None


@contextmanager
def _receipt(
    manifest: pb.WeightManifest, buffer: memoryview | None, on_arrival: Callable[[Arrival], None] | None
) -> Iterator[Receipt]:
    """A receipt whose arrival ends when it is left: torn, unless it was announced."""
    size = manifest.payload_bytes
    place = pages.take(size) if buffer is None else buffer
    fetched_whole = buffer is None and not manifest.HasField("base_version")
    receipt = Receipt(
        place,
        [(0, size)] if buffer is None else [],
        Arrival(manifest, place),
        PassingDigests(manifest) if fetched_whole else None,
    )
    if on_arrival is not None:
        on_arrival(receipt.arrival)
    try:
        yield receipt
    finally:
        receipt.arrival.tear()


async def get_manifest(
    channel: grpc.aio.Channel, run_id: str, version: int | None = None, base: Held | None = None
) -> pb.WeightManifest:
    """Ask for a manifest and refuse one that is not what was asked for or contradicts itself."""
    answer = await _describe(channel, run_id, version, base, ())
    manifest: pb.WeightManifest = answer.manifest
    return manifest


async def _describe(
    channel: grpc.aio.Channel,
    run_id: str,
    version: int | None,
    base: Held | None,
    transports: Sequence[Transport],
) -> pb.GetManifestResponse:
    request = pb.GetManifestRequest(run_id=run_id, version=version)
    if base is not None:
        request.base_version, request.base_digest = base.manifest.version, base.manifest.digest
    for transport in transports:
        transport.ask(request)
    prepares = base is not None or bool(transports)
    response: pb.GetManifestResponse = await unary(
        _stub(channel).GetManifest,
        request,
        timeout_s=PREPARE_TIMEOUT_SECONDS if prepares else MANIFEST_TIMEOUT_SECONDS,
        budget=RetryBudget(),
    )
    manifest: pb.WeightManifest = response.manifest
    await asyncio.to_thread(check_manifest, manifest)
    is_delta = manifest.HasField("base_version")
    # With a base a chain may lead over other versions; the newest is reached at once.
    reached = version in (None, manifest.version) or (is_delta and base is not None)
    if run_id not in ("", manifest.run_id) or not reached:
        raise mismatch(f"manifest of version {version} of run {run_id}")
    if is_delta and (base is None or not _leads_from(base, manifest)):
        raise mismatch(f"base version {manifest.base_version} of the manifest")
    if manifest.payload_bytes > MAX_PAYLOAD_BYTES:
        raise QuartetError(
            "OVERLOADED",
            f"a payload of {manifest.payload_bytes} bytes is over the bound of {MAX_PAYLOAD_BYTES}",
        )
    return response


def _leads_from(base: Held, manifest: pb.WeightManifest) -> bool:
    return (manifest.base_version, manifest.base_digest) == (base.manifest.version, base.manifest.digest)


async def _payload(channel: grpc.aio.Channel, manifest: pb.WeightManifest, receipt: Receipt) -> None:
    """Receive the payload of a manifest whole, resuming where it tears."""
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
    await asyncio.to_thread(receipt.verify_whole)


async def _receive(channel: grpc.aio.Channel, manifest: pb.WeightManifest, receipt: Receipt) -> None:
    """Run one stream from the first missing byte, for as long as it brings what is missing."""
    position = receipt.missing[0][0] if receipt.missing else receipt.size
    request = pb.FetchRequest(run_id=manifest.run_id, version=manifest.version, offset=position)
    if manifest.HasField("base_version"):
        request.base_version, request.base_digest = manifest.base_version, manifest.base_digest
    # No deserializer: decode_frame reads the messages as they came.
    method = channel.unary_stream(FETCH_METHOD, request_serializer=pb.FetchRequest.SerializeToString)
    call = method(request)
    signs = 0
    try:
        async for message in stream(call, idle_timeout_s=FETCH_IDLE_SECONDS):
            frame = decode_frame(message)
            if frame is None:
                raise mismatch(f"frame at byte {position}")
            if isinstance(frame, pb.WeightEnd):
                return receipt.accept_end(frame, position)
            signs = 0 if frame.data else signs + 1
            if signs > MAX_SIGNS:
                raise QuartetError("DEADLINE", f"{signs} signs of life, and no byte", waited_for="chunk")
            position = receipt.accept(frame, position)
            if not receipt.wants(position):
                return None
        raise QuartetError("NOT_READY", f"the stream of version {manifest.version} tore at byte {position}")
    finally:
        call.cancel()


def _stub(channel: grpc.aio.Channel) -> Any:
    stub: Any = rpc.WeightServiceStub(channel)  # type: ignore[no-untyped-call]
    return stub


def _backoff_seconds(tries: int) -> float:
    return pause_s(tries, *BACKOFF_SECONDS)


async def watch(
    channel: grpc.aio.Channel,
    run_id: str,
    held: int | None,
    relay_address: str = "",
    on_away: Callable[[QuartetError | None], None] = lambda why: None,
) -> AsyncGenerator[pb.VersionAnnounced, None]:
    """Yield what is newest at the publisher when it changes, for ever; at first only if newer than `held`.

    A caller with a `relay_address` is told to others as a source of what it is told. `on_away` is called with
    the error when the publisher does not answer, or not for the run, and with none as long as it does.

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
                on_away(None)
                if response.WhichOneof("event") == "announced" and response.announced != told:
                    told = response.announced
                    yield response.announced
        except QuartetError as error:
            if error.reason in PERMANENT:
                raise
            on_away(error)
            # A run that is over is looked for as long as its adapter is served.
            if failures & (failures - 1) == 0:
                log.info("watch lost", run_id=run_id, why=error.message, failures=failures)
        finally:
            call.cancel()
        failures += 1
        await asyncio.sleep(_backoff_seconds(failures))
