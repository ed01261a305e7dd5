"""What has arrived of a payload: which bytes are there, which are missing, which were damaged.

1. Bytes count as arrived only when their chunk's checksum agreed and the chunk lay where it was due.
2. WeightEnd counts only after the last byte.
3. `complete` says that both are there; the digest of the whole is not yet compared (`verify_whole`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from quartet.v1 import weights_pb2 as pb
from quartet.weights.arrival import Arrival
from quartet.weights.frames import Chunk
from quartet.weights.manifest import mismatch
from quartet.weights.passing import PassingDigests
from quartet.weights.payload import CHUNK_BYTES, Payload

#: Times one span is fetched again because its bytes were damaged.
MAX_REFETCHES = 3
#: Damaged chunks of one payload, wherever they lie. TCP lets one damaged segment in many millions pass: a way
#: or a sender that damages more is broken, and would have nearly all of a payload sent several times over.
MAX_DAMAGED = 256


@dataclass(slots=True)
class Receipt:
    """A buffer that a payload arrives in; the spans begin..end that are missing; the last frame."""

    buffer: memoryview
    missing: list[tuple[int, int]]
    arrival: Arrival
    passing: PassingDigests | None = None
    end: pb.WeightEnd | None = None
    refetches: dict[int, int] = field(default_factory=dict)
    #: Over the first `hashed` bytes, taken while they are in the cache.
    state: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    hashed: int = 0

    @property
    def size(self) -> int:
        """Bytes of the whole payload."""
        return len(self.buffer)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing; the digest of the whole is not compared yet."""
        return not self.missing and self.end is not None

    @property
    def exhausted(self) -> bool:
        """Whether too many chunks were damaged, or one too often, to fetch any again."""
        counts = self.refetches.values()
        return any(count > MAX_REFETCHES for count in counts) or sum(counts) > MAX_DAMAGED

    def wants(self, position: int) -> bool:
        """Whether a stream at this position has news: missing bytes, or WeightEnd after all bytes."""
        return position == self.size or any(begin <= position < end for begin, end in self.missing)

    def accept(self, chunk: Chunk, position: int) -> int:
        """Take the chunk that must lie at this position, return the next one; damaged bytes stay missing."""
        data = chunk.data
        if chunk.offset != position or len(data) > min(CHUNK_BYTES, self.size - position):
            raise mismatch(f"place of the chunk at {chunk.offset}")
        if not data:
            return position  # a relay's sign of life
        until = position + len(data)
        if xxhash.xxh3_64_intdigest(data) == chunk.checksum:
            self.buffer[position:until] = data
            if position == self.hashed:
                self.state.update(data)
                if self.passing is not None:
                    self.passing.update(position, data)
                self.hashed = until
            self.missing = [span for old in self.missing for span in _without(old, position, until)]
            self.arrival.advance(self.missing[0][0] if self.missing else self.size)
            return until
        self.refetches[position] = self.refetches.get(position, 0) + 1
        if self.exhausted:
            damaged = sum(self.refetches.values())
            raise mismatch(f"chunk at {position}, {self.refetches[position]} times over, {damaged} in all,")
        return until

    def close(self) -> None:
        """Count bytes that came whole, by another road than Fetch, as the payload. Not for the event loop."""
        digest = xxhash.xxh3_128_digest(self.buffer)
        self.end = pb.WeightEnd(payload_bytes=self.size, payload_digest=digest)

    def verify_whole(self) -> None:
        """Compare the digest of the whole; CHECKSUM_MISMATCH. Not for the event loop."""
        assert self.complete and self.end is not None
        # What came out of its order, because it was fetched again.
        self.state.update(self.buffer[self.hashed :])
        if self.state.digest() != self.end.payload_digest:
            raise mismatch("payload")

    def payload(self) -> Payload:
        """The verified payload, to be handed on."""
        return Payload([self.buffer])

    def accept_end(self, end: pb.WeightEnd, position: int) -> None:
        """Take WeightEnd, which is true only after the last byte."""
        if position != self.size or end.payload_bytes != self.size:
            raise mismatch("size of the payload in WeightEnd")
        self.end = end


def _without(span: tuple[int, int], begin: int, end: int) -> list[tuple[int, int]]:
    rest = [(span[0], min(span[1], begin)), (max(span[0], end), span[1])]
    return [(first, last) for first, last in rest if first < last]
