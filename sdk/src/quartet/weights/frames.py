"""FetchResponse and PushRequest by hand: the same bytes as protobuf's, without its copies of every chunk.

1. `encode_chunk` writes exactly what SerializeToString writes: a peer cannot tell.
2. `decode_frame` and `decode_push` accept whatever protobuf accepts; what protobuf itself would write is read
   without a copy, the rest by protobuf.
3. Bytes that are no such message decode to None, never to an exception: the wire is not trusted.
4. Of a PushRequest what this release does not know is refused, as of every request (quartet.kit.unknown).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from quartet.kit.unknown import refuse_unknown
from quartet.v1 import weights_pb2 as pb

PUSH_METHOD = f"/{pb.DESCRIPTOR.services_by_name['WeightService'].full_name}/Push"

# Tags of the wire format: (field number << 3) | wire type.
FETCH_CHUNK = 0x0A
PUSH_CHUNK = 0x12
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


def encode_chunk(
    offset: int, parts: Iterable[memoryview | bytes], size: int, checksum: int, tag: int = FETCH_CHUNK
) -> bytes:
    """A serialized message with a chunk of `size` > 0 bytes, given as parts that are copied once."""
    head = b"\x08" + _varint(offset) if offset else b""
    head += b"\x12" + _varint(size)
    tail = b"\x19" + checksum.to_bytes(_CHECKSUM_BYTES, "little") if checksum else b""
    return b"".join((bytes([tag]), _varint(len(head) + size + len(tail)), head, *parts, tail))


def decode_frame(message: bytes) -> Chunk | pb.WeightEnd | None:
    """The frame of a serialized FetchResponse; None for one without a frame, and for bytes that are none."""
    chunk = _decode_canonical(message, FETCH_CHUNK)
    if chunk is not None:
        return chunk
    try:
        response = pb.FetchResponse.FromString(message)
    except DecodeError:
        return None
    match response.WhichOneof("frame"):
        case "chunk":
            return _chunk(response.chunk)
        case "end":
            return response.end
    return None


def decode_push(message: bytes) -> Chunk | pb.WeightManifest | pb.WeightEnd | None:
    """The frame of a serialized PushRequest; None for one without a frame, and for bytes that are none.

    Errors: NOT_IMPLEMENTED.
    """
    chunk = _decode_canonical(message, PUSH_CHUNK)
    if chunk is not None:
        return chunk
    try:
        request = pb.PushRequest.FromString(message)
    except DecodeError:
        return None
    refuse_unknown(request, message, PUSH_METHOD)
    match request.WhichOneof("frame"):
        case "manifest":
            return request.manifest
        case "chunk":
            return _chunk(request.chunk)
        case "commit":
            return request.commit
    return None


def _chunk(chunk: pb.WeightChunk) -> Chunk:
    return Chunk(chunk.offset, memoryview(chunk.data), chunk.checksum)


def _decode_canonical(message: bytes, tag: int) -> Chunk | None:
    """The chunk, if the message is offset, data and checksum in this order, each once, and nothing else."""
    try:
        if message[0] != tag:
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
