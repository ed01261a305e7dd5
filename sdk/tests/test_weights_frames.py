"""The hand-written codec is protobuf's, byte for byte and refusal for refusal."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from quartet.v1 import weights_pb2 as pb
from quartet.weights.frames import Chunk, decode_frame, encode_chunk

U64 = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 127, 128, 2**20, 2**35])
DATA = st.binary(min_size=1, max_size=300)


@given(U64, st.lists(DATA, min_size=1, max_size=4), U64)
def test_encoded_chunks_are_what_protobuf_writes_and_decode_back(
    offset: int, parts: list[bytes], checksum: int
) -> None:
    data = b"".join(parts)
    message = encode_chunk(offset, parts, len(data), checksum)
    chunk = pb.WeightChunk(offset=offset, data=data, checksum=checksum)
    assert message == pb.FetchResponse(chunk=chunk).SerializeToString()
    assert decode_frame(message) == Chunk(offset, memoryview(data), checksum)


def test_the_canonical_form_is_read_without_a_copy() -> None:
    message = encode_chunk(5, [bytes(1 << 20)], 1 << 20, 7)
    frame = decode_frame(message)
    assert isinstance(frame, Chunk) and frame.data.obj is message


@given(U64, st.binary(max_size=20))
def test_the_end_is_read(size: int, digest: bytes) -> None:
    end = pb.WeightEnd(payload_bytes=size, payload_digest=digest)
    assert decode_frame(pb.FetchResponse(end=end).SerializeToString()) == end


def by_protobuf(message: bytes) -> Chunk | pb.WeightEnd | None:
    try:
        response = pb.FetchResponse.FromString(message)
    except Exception:  # noqa: BLE001 - protobuf's own verdict, whatever it is
        return None
    if response.HasField("end"):
        return response.end
    if response.HasField("chunk"):
        return Chunk(response.chunk.offset, memoryview(response.chunk.data), response.chunk.checksum)
    return None


@settings(max_examples=500)
@given(st.binary(max_size=60))
def test_noise_means_what_it_means_to_protobuf(noise: bytes) -> None:
    assert decode_frame(noise) == by_protobuf(noise)


@settings(max_examples=500)
@given(U64, DATA, U64, st.data())
def test_a_damaged_message_means_what_it_means_to_protobuf(
    offset: int, payload: bytes, checksum: int, data: st.DataObject
) -> None:
    message = bytearray(encode_chunk(offset, [payload], len(payload), checksum))
    kind = data.draw(st.sampled_from(["flip", "cut", "double", "insert"]))
    at = data.draw(st.integers(0, min(len(message) - 1, 30)))
    if kind == "flip":
        message[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del message[at:]
    elif kind == "double":
        message += bytes(message)
    else:
        message[at:at] = data.draw(st.binary(min_size=1, max_size=3))
    assert decode_frame(bytes(message)) == by_protobuf(bytes(message))
