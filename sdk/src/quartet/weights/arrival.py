"""A payload on its way in, for those who already read what has come: how a relay passes a version on early.

1. Readers see a prefix of the payload, and only bytes whose chunks passed their checksums.
2. `end` is known only after everything in the payload was verified: nobody downstream can hold it earlier.
3. An arrival ends once: whole, or torn. Whoever waits is woken either way.
4. A reader hears something every SIGN_SECONDS, so that a relay that waits is told from one that is gone.

For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import xxhash

from quartet.errors import QuartetError
from quartet.kit.news import News
from quartet.v1 import weights_pb2 as pb
from quartet.weights.frames import Chunk, decode_frame, encode_chunk
from quartet.weights.payload import chunk_spans

#: Between signs of life: often enough that a reader may give a silent relay up within seconds.
SIGN_SECONDS = 1.0
#: Key of what a relay says beside NOT_READY: for how long its publisher may still prepare what it fetches.
PREPARES = "prepares_ms"
#: Messages below it may be signs of life; larger ones are not looked into.
_SMALL_BYTES = 64


class Arrival:
    """One payload under way."""

    def __init__(self, manifest: pb.WeightManifest, buffer: memoryview) -> None:
        """`buffer` is where the payload will stand."""
        self.manifest = manifest
        #: Closes the payload; None until it is verified whole.
        self.end: pb.WeightEnd | None = None
        self._buffer = buffer.toreadonly()
        self._verified = 0
        self._torn = False
        self._changed = News()

    def advance(self, verified: int) -> None:
        """So many bytes from the start are there, and their chunks are checked."""
        if verified > self._verified:
            self._verified = verified
            self._changed.tell()

    def finish(self, end: pb.WeightEnd) -> None:
        """Every byte, tensor and digest was verified."""
        self._verified, self.end = len(self._buffer), end
        self._changed.tell()

    def tear(self) -> None:
        """The fetch was given up. Without effect after `finish`."""
        self._torn = self.end is None
        self._changed.tell()

    async def encoded_chunks(self, offset: int) -> AsyncGenerator[bytes, None]:
        """Serialized FetchResponses from `offset` on as the bytes come, then WeightEnd.

        Errors: VERSION_UNKNOWN when the fetch is torn.
        """
        for begin, until in chunk_spans(len(self._buffer), offset):
            while self._verified < until:
                self._check()
                if not await self._wait():
                    yield sign_of_life(begin)
            data = self._buffer[begin:until]
            yield encode_chunk(begin, (data,), until - begin, xxhash.xxh3_64_intdigest(data))
        while self.end is None:
            self._check()
            if not await self._wait():
                yield sign_of_life(len(self._buffer))
        yield pb.FetchResponse(end=self.end).SerializeToString()

    def _check(self) -> None:
        if self._torn:
            raise QuartetError(
                "VERSION_UNKNOWN",
                f"this relay gave version {self.manifest.version} up; ask the publisher what is newest",
                version=self.manifest.version,
            )

    async def _wait(self) -> bool:
        """Wait for the next change; False when it is time for a sign of life."""
        try:
            async with asyncio.timeout(SIGN_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True


def sign_of_life(offset: int) -> bytes:
    """A serialized FetchResponse that brings nothing: the byte at `offset` is still to come."""
    empty = pb.WeightChunk(offset=offset, checksum=xxhash.xxh3_64_intdigest(b""))
    return pb.FetchResponse(chunk=empty).SerializeToString()


def is_sign_of_life(message: bytes) -> bool:
    """Whether a serialized FetchResponse is one."""
    if len(message) > _SMALL_BYTES:
        return False
    frame = decode_frame(message)
    return isinstance(frame, Chunk) and not frame.data
