"""Push: a version made elsewhere, staged, verified, and committed whole or not at all.

1. Only the commit frame counts: a stream that ends without it leaves nothing. To a server of grpc.aio a
   client that was killed looks like one that ended its stream.
2. What is committed has every tensor of its manifest with its digest; until then nobody can see it.
3. Bounded: MAX_STAGED_BYTES and MAX_PUSHES at once, IDLE_SECONDS between two frames, and on both sides the
   time that the bytes of an upload justify: one that trickles holds no place for ever.
4. Repeating a committed version succeeds, without its bytes being read. Where it is the newest of its run, it
   is what came last.
5. The server sends GO_AHEAD as initial metadata once it wants the payload, and `push_version` waits for it: a
   refusal comes before the bytes, and not while they are written, when grpc.aio loses it (grpc/grpc#36066).
6. Bytes are hashed and copied in threads, at both ends, and the tensors of a manifest gone through there:
   neither event loop waits for them.
7. What could never be served is refused before its bytes are sent: weights that do not fit the model, a
   number that is held with others, and one below a number that is held.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import grpc
import xxhash

from quartet.errors import LOST_STATUS, QuartetError, from_rpc, refused
from quartet.kit import tracing
from quartet.kit.own_log import get_logger
from quartet.kit.shielded import shielded
from quartet.run.name import RULE, is_run_id
from quartet.v1 import weights_pb2 as pb
from quartet.weights import pages
from quartet.weights.delta import Delta, Held, apply_delta, make_delta
from quartet.weights.fetched import Fetched
from quartet.weights.frames import PUSH_CHUNK, PUSH_METHOD, Chunk, decode_push
from quartet.weights.layout import METADATA_NAME
from quartet.weights.manifest import build_manifest, check_manifest, mismatch, of_full_payload
from quartet.weights.payload import CHUNK_BYTES, Payload, decode_payload, full_payload
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet.weights.versions import Version, check_same

#: What all uploads together may occupy before they are committed: two models of 235B parameters in bfloat16,
#: as a delta is staged with what it leads to.
MAX_STAGED_BYTES = 1 << 40
#: Uploads at once; a run has one trainer.
MAX_PUSHES = 4
#: Between two frames; a client that sends none for so long is frozen or gone.
IDLE_SECONDS = 30.0
#: A client tries so often; whatever a repetition may mend.
MAX_TRIES = 4
RETRIED = frozenset({"NOT_READY", "OVERLOADED", "DEADLINE", "STREAM_TORN", "CHECKSUM_MISMATCH"})
#: An upload takes no longer than this, and a second for so many bytes: what holds a place longer trickles.
#: As much as a trainer gives samples: a narrow way between two sites suffices.
PUSH_SECONDS, BYTES_PER_SECOND = 60.0, 1e6
#: Full jitter is not needed: a run has one trainer.
RETRY_SECONDS = 0.5

#: Key of the initial metadata that asks for the payload.
GO_AHEAD = "quartet-go-ahead"

#: Refuses, with INVALID_REQUEST, a manifest whose weights could not be served.
Fits = Callable[[pb.WeightManifest], None]

log = get_logger()


class Pushes:
    """The uploads under way to one store. For one event loop."""

    def __init__(self, store: WeightStore, fits: Fits) -> None:
        """`fits` refuses a manifest whose weights could not be served; it is called in a thread."""
        self._store, self._fits = store, fits
        self._staged_bytes: list[int] = []
        self._committing = asyncio.Lock()

    async def receive(
        self, messages: AsyncIterator[bytes], go_ahead: Callable[[], Awaitable[None]]
    ) -> pb.PushResponse:
        """Take one upload from serialized PushRequests; `go_ahead` is called when the payload is wanted.

        Errors: STREAM_TORN, CHECKSUM_MISMATCH, INVALID_REQUEST, SEQUENCE_CONFLICT, VERSION_UNKNOWN (of the
        base), OVERLOADED, DEADLINE, NOT_IMPLEMENTED (what a newer release says).
        """
        manifest = await _next(messages)
        if not isinstance(manifest, pb.WeightManifest):
            raise _misplaced("the first frame is not a manifest", "send the manifest first")
        if not is_run_id(manifest.run_id):
            raise refused("manifest.run_id", manifest.run_id, RULE)
        tracing.note_run(manifest)  # its frames are no messages to the interceptor
        await asyncio.to_thread(_check, manifest)
        await asyncio.to_thread(self._fits, manifest)
        base = self._base(manifest)
        held = self._committed(manifest)
        if held is not None:
            await self._commit(Fetched(held.manifest, dict(held.tensors)), held)
            return pb.PushResponse(version=manifest.version)
        self._check_newer(manifest)
        with self._staging(manifest, await asyncio.to_thread(_size_with_base, manifest)) as buffer:
            await go_ahead()
            limit_s = _upload_seconds(len(buffer))
            try:
                async with asyncio.timeout(limit_s):
                    await _receive(messages, buffer)
            except TimeoutError:
                raise QuartetError(
                    "DEADLINE", f"the upload took longer than {limit_s:.0f} s", waited_for="commit"
                ) from None
            pushed = await asyncio.to_thread(_verified, buffer, manifest, base)
            await self._commit(pushed, None)
        log.info("version pushed", run_id=manifest.run_id, version=manifest.version, bytes=len(buffer))
        return pb.PushResponse(version=manifest.version)

    async def _commit(self, pushed: Fetched, held: Version | None) -> None:
        """Make it what came last, where nothing newer came meanwhile; `held`: it was committed before."""

        async def commit() -> None:
            async with self._committing:
                if held is None:
                    self._check_newer(pushed.manifest)
                elif held is not self._store.latest(pushed.manifest.run_id):
                    return
                await asyncio.to_thread(self._store.commit, pushed)

        # Its thread goes on when the client leaves: the next one has to wait for it.
        await shielded(asyncio.create_task(commit()))

    def _base(self, manifest: pb.WeightManifest) -> Held | None:
        if not manifest.HasField("base_version"):
            return None
        base = self._store.get(manifest.run_id, manifest.base_version)
        if base.manifest.digest != manifest.base_digest:
            raise QuartetError(
                "VERSION_UNKNOWN",
                f"version {manifest.base_version} is held with other weights; push the full payload",
                version=manifest.base_version,
                latest=base.number,
            )
        return base

    def _committed(self, manifest: pb.WeightManifest) -> Version | None:
        """These very weights, where they are held. Errors: SEQUENCE_CONFLICT where others are."""
        try:
            held = self._store.get(manifest.run_id, manifest.version)
        except QuartetError:
            return None
        check_same(held.manifest, manifest)
        return held

    def _check_newer(self, manifest: pb.WeightManifest) -> None:
        """Whoever follows a run goes on to larger numbers: what comes below them would never be served."""
        try:
            latest = self._store.latest(manifest.run_id)
        except QuartetError:
            return
        if latest is not None and manifest.version < latest.number:
            raise QuartetError(
                "SEQUENCE_CONFLICT",
                f"version {manifest.version} of run {manifest.run_id} comes after {latest.number}, and would "
                "never be served; push a larger number, or go back under another run_id",
                have=latest.number,
                want=manifest.version,
            )

    @contextmanager
    def _staging(self, manifest: pb.WeightManifest, size: int) -> Iterator[memoryview]:
        """A buffer for the payload, within the bounds; `size` is what the upload needs of memory."""
        if len(self._staged_bytes) >= MAX_PUSHES or sum(self._staged_bytes) + size > MAX_STAGED_BYTES:
            raise QuartetError(
                "OVERLOADED",
                f"{len(self._staged_bytes)} uploads of {sum(self._staged_bytes)} bytes are under way, and at "
                f"most {MAX_PUSHES} of {MAX_STAGED_BYTES} may be; push again when one has ended",
                size=size,
                bound=MAX_STAGED_BYTES,
            )
        self._staged_bytes.append(size)
        try:
            yield pages.take(manifest.payload_bytes)
        finally:
            self._staged_bytes.remove(size)


def _size_with_base(manifest: pb.WeightManifest) -> int:
    """The tensors of a delta are made beside it, those of a full payload are views of it."""
    size = int(manifest.payload_bytes)
    return size + of_full_payload(manifest).payload_bytes if manifest.HasField("base_version") else size


def _check(manifest: pb.WeightManifest) -> None:
    """Errors: CHECKSUM_MISMATCH; INVALID_REQUEST where only its maker can have been wrong."""
    names = [info.name for info in manifest.tensors]
    for before, name in pairwise(names):
        if name <= before:
            remedy = "list the tensors ascending by name, each once"
            raise refused("manifest.tensors", f"{name} after {before}", remedy)
    if METADATA_NAME in names:
        remedy = "give the tensor another name: safetensors uses this one itself"
        raise refused("manifest.tensors", METADATA_NAME, remedy)
    check_manifest(manifest)


def _upload_seconds(size: int) -> float:
    return PUSH_SECONDS + size / BYTES_PER_SECOND


async def _receive(messages: AsyncIterator[bytes], buffer: memoryview) -> None:
    """Fill the buffer, up to and with the commit."""
    position = 0
    state = xxhash.xxh3_128()
    while True:
        frame = await _next(messages)
        match frame:
            case Chunk():
                position = await asyncio.to_thread(_accept, frame, position, buffer, state)
            case pb.WeightEnd():
                if frame.payload_bytes != len(buffer):
                    raise mismatch("size of the payload in the commit", frame.payload_bytes, len(buffer))
                if position != len(buffer):
                    raise mismatch("size of the payload", len(buffer), position)
                if frame.payload_digest != state.digest():
                    raise mismatch("digest of the payload", frame.payload_digest.hex(), state.hexdigest())
                return
            case _:
                raise _misplaced("a second manifest", "send one manifest, then chunks, then the commit")


def _accept(chunk: Chunk, position: int, buffer: memoryview, state: xxhash.xxh3_128) -> int:
    size = len(chunk.data)
    if not 0 < size <= CHUNK_BYTES:
        raise refused("chunk.data", f"{size} bytes", f"send 1 to {CHUNK_BYTES} bytes in a chunk")
    if chunk.offset != position:
        raise refused("chunk.offset", chunk.offset, f"the next chunk begins at {position}")
    if size > len(buffer) - position:
        raise mismatch("size of the payload", len(buffer), f"{position + size} or more")
    checksum = xxhash.xxh3_64_intdigest(chunk.data)
    if checksum != chunk.checksum:
        raise mismatch(f"checksum of the chunk at {position}", f"{chunk.checksum:016x}", f"{checksum:016x}")
    state.update(chunk.data)
    buffer[position : position + len(chunk.data)] = chunk.data
    return position + len(chunk.data)


async def _next(messages: AsyncIterator[bytes]) -> Chunk | pb.WeightManifest | pb.WeightEnd:
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            message = await anext(messages)
    except StopAsyncIteration:
        raise QuartetError("STREAM_TORN", "the stream ended without a commit; push again") from None
    except TimeoutError:
        raise QuartetError("DEADLINE", f"no frame came for {IDLE_SECONDS:g} s", waited_for="frame") from None
    frame = decode_push(message)
    if frame is None:
        raise _misplaced("a message without a frame", "send manifest, chunks and commit")
    return frame


def _misplaced(what: str, remedy: str) -> QuartetError:
    return QuartetError("INVALID_REQUEST", f"{what}; {remedy}", field="frame", value=what, remedy=remedy)


def _verified(buffer: memoryview, manifest: pb.WeightManifest, base: Held | None) -> Fetched:
    if base is None:
        return Fetched(manifest, decode_payload(buffer, manifest), (), len(buffer))
    tensors = apply_delta(buffer, manifest, base)
    delta = Delta(manifest, Payload([buffer]))
    return Fetched(of_full_payload(manifest), tensors, (delta,), len(buffer))


async def push_version(
    channel: grpc.aio.Channel,
    run_id: str,
    version: int,
    tensors: Mapping[str, Tensor],
    *,
    base: Held | None = None,
    canary: pb.Canary | None = None,
    adapter_config: str = "",
) -> Fetched:
    """Upload a version and return it: the base of the next one. With a base only what changed is sent.

    Safe to repeat. Errors: those of Push; NOT_IMPLEMENTED where no uploads are taken.
    """
    manifest = await asyncio.to_thread(
        build_manifest, run_id, version, tensors, canary=canary, adapter_config=adapter_config
    )
    made = Fetched(manifest, dict(tensors))
    if base is not None:
        delta = await asyncio.to_thread(make_delta, base, made)
        try:
            await _push(channel, delta.manifest, delta.payload)
            return made
        except QuartetError as error:
            if error.reason not in ("VERSION_UNKNOWN", "RUN_UNKNOWN"):
                raise
            log.info("base not held there, pushing everything", run_id=run_id, version=version)
    await _push(channel, manifest, await asyncio.to_thread(full_payload, made.tensors))
    return made


async def _push(channel: grpc.aio.Channel, manifest: pb.WeightManifest, payload: Payload) -> None:
    for attempt in range(1, MAX_TRIES + 1):
        try:
            return await _push_once(channel, manifest, payload)
        except QuartetError as error:
            if error.reason not in RETRIED or attempt == MAX_TRIES:
                raise
            log.warning("push torn", run_id=manifest.run_id, version=manifest.version, why=error.message)
            await asyncio.sleep(max(RETRY_SECONDS * attempt, (error.retry_after_ms or 0) / 1000))


async def _push_once(channel: grpc.aio.Channel, manifest: pb.WeightManifest, payload: Payload) -> None:
    async def messages() -> AsyncIterator[bytes]:
        yield pb.PushRequest(manifest=manifest).SerializeToString()
        if GO_AHEAD not in dict(await call.initial_metadata()):
            # The call ends without the payload; nothing may be written until its status is there.
            await call.code()
            return
        chunks = payload.encoded_chunks(0, PUSH_CHUNK)
        while (message := await asyncio.to_thread(next, chunks, None)) is not None:
            yield message
        yield pb.PushRequest(commit=payload.end()).SerializeToString()

    # No serializer: the messages are ready for the wire.
    method: Any = channel.stream_unary(PUSH_METHOD, response_deserializer=pb.PushResponse.FromString)
    limit_s = _upload_seconds(payload.size)
    call = method(messages(), timeout=limit_s)
    try:
        response = await call
    except grpc.RpcError as error:
        if error.details() == LOST_STATUS:
            raise QuartetError("STREAM_TORN", "the upload was refused while it was sent") from None
        failure = from_rpc(error)
        if failure.reason == "DEADLINE" and "grpc_code" in failure.metadata:  # our own, which says nothing
            text = f"the upload of {payload.size} bytes took longer than {limit_s:.0f} s"
            raise QuartetError("DEADLINE", text, waited_for="answer") from None
        raise failure from None
    if response.version != manifest.version:
        raise mismatch(f"version {response.version} in the answer to a push of {manifest.version}")
