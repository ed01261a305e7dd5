"""FetchResponse by hand: the same bytes as protobuf's, without its copies of every chunk.

1. `encode_chunk` writes exactly what FetchResponse.SerializeToString writes: a peer cannot tell.
2. `decode_frame` accepts whatever protobuf accepts; what protobuf itself would write is read
   without a copy, the rest by protobuf.
3. Bytes that are no FetchResponse decode to None, never to an exception: the wire is not trusted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from quartet.v1 import weights_pb2 as pb

# Tags of the wire format: (field number << 3) | wire type.
_CHUNK = 0x0A
_OFFSET = 0x08
_DATA = 0x12
_CHECKSUM = 0x19
_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """A WeightChunk whose data is a view of the message it came in."""

    offset: int
    data: memoryview
    checksum: int


def encode_chunk(offset: int, parts: Iterable[memoryview | bytes], size: int, checksum: int) -> bytes:
    """A serialized FetchResponse with a chunk of `size` > 0 bytes, given as parts that are copied once."""
    head = b"\x08" + _varint(offset) if offset else b""
    head += b"\x12" + _varint(size)
    tail = b"\x19" + checksum.to_bytes(_CHECKSUM_BYTES, "little") if checksum else b""
    return b"".join((b"\x0a", _varint(len(head) + size + len(tail)), head, *parts, tail))


def decode_frame(message: bytes) -> Chunk | pb.WeightEnd | None:
    """The frame of a serialized FetchResponse; None for one without a frame, and for bytes that are none."""
    chunk = _decode_canonical(message)
    if chunk is not None:
        return chunk
    try:
        response = pb.FetchResponse.FromString(message)
    except DecodeError:
        return None
    match response.WhichOneof("frame"):
        case "chunk":
            return Chunk(response.chunk.offset, memoryview(response.chunk.data), response.chunk.checksum)
        case "end":
            return response.end
    return None


def _decode_canonical(message: bytes) -> Chunk | None:
    """The chunk, if the message is offset, data and checksum in this order, each once, and nothing else."""
    try:
        if message[0] != _CHUNK:
            return None
        size, at = _read_varint(message, 1)
        if at + size != len(message):
            return None
        offset = 0
        if message[at] == _OFFSET:
            offset, at = _read_varint(message, at + 1)
        if message[at] != _DATA:
            return None
        size, at = _read_varint(message, at + 1)
        end = at + size
        if message[end] != _CHECKSUM or end + 1 + _CHECKSUM_BYTES != len(message):
            return None
    except IndexError:
        return None
    return Chunk(offset, memoryview(message)[at:end], int.from_bytes(message[end + 1 :], "little"))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """A varint and the position after it; IndexError where it is longer than 64 bits or cut off."""
    value = 0
    for shift in range(0, 64, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, at
    raise IndexError("varint")
