"""Deltas by the contract alone: a reader that has weights.proto and nothing else, and bytes to check one by.

weights_vectors.json was made by hand from the same comments: version 7 whole, the delta from it to version 8,
and version 8 whole, each with its manifest as protobuf's JSON and its payload in base64.
"""

from __future__ import annotations

import json
import struct
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
import zstandard
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st
from quartet.v1 import weights_pb2 as pb
from quartet.weights import sparse
from quartet.weights.delta import apply_delta
from quartet.weights.fetched import Fetched
from quartet.weights.manifest import check_manifest
from quartet.weights.payload import decode_payload

VECTORS = json.loads((Path(__file__).parent / "weights_vectors.json").read_text())
SEGMENT = 1_048_576
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 4}
WIDTHS = FLOATS | {"I32": 4, "U8": 1, "I64": 8, "F8_E8M0": 1}


def vector(name: str) -> tuple[pb.WeightManifest, bytes]:
    payload = b64decode(VECTORS[name]["payload"])
    assert xxhash.xxh3_128_digest(payload) == b64decode(VECTORS[name]["payload_digest"])
    return ParseDict(VECTORS[name]["manifest"], pb.WeightManifest()), payload


def stored(payload: bytes) -> dict[str, bytes]:
    size = struct.unpack_from("<Q", payload)[0]
    header, data = json.loads(payload[8 : 8 + size]), payload[8 + size :]
    return {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}


def order(bits: int, width: int, dtype: str) -> int:
    """As weights.proto says it, of a value's bits; the number has the sign that its highest bit says."""
    top = 1 << 8 * width - 1
    value = bits - 2 * top if bits & top else bits
    return value ^ (top - 1) if value < 0 and dtype in FLOATS else value


def decode(blob: bytes, base: bytes, dtype: str) -> bytes:
    """SPARSE, value by value."""
    width, at, out = WIDTHS[dtype], 0, bytearray(base)

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return blob[at - size : at]

    def stream() -> bytes:
        (size,) = struct.unpack("<I", take(4))
        data = take(size & 0x7FFFFFFF)
        return zstandard.ZstdDecompressor().decompress(data) if size >> 31 else data

    def places(gaps: bytes) -> Iterator[int]:
        place = 0
        for gap in gaps:
            place += gap
            if gap < 255:
                yield place
                place += 1

    count = len(base) // width
    for begin in range(0, count, SEGMENT):
        form = take(1)[0]
        if form == 0:
            continue
        listed, escaped = struct.unpack("<II", take(8))
        where = list(places(stream())) if form == 1 else range(min(SEGMENT, count - begin))
        codes, planes = stream(), [stream() for _ in range(width)]
        escapes = [int.from_bytes(one, "little") for one in zip(*planes, strict=True)]
        assert len(where) == listed and len(escapes) == escaped
        remaining = iter(escapes)
        for number, place in enumerate(where):
            code = codes[number // 4] >> 2 * (number % 4) & 3
            zigzag = next(remaining) if code == 3 else code
            d = -(zigzag + 1) // 2 if zigzag % 2 else zigzag // 2
            span = slice((begin + place) * width, (begin + place + 1) * width)
            moved = order(int.from_bytes(base[span], "little"), width, dtype) + d
            mask = (1 << 8 * width) - 1
            out[span] = (order(moved & mask, width, dtype) & mask).to_bytes(width, "little")
    assert at == len(blob)
    return bytes(out)


def test_the_contract_says_enough_to_read_a_delta() -> None:
    """Every encoding, decoded by the comments of weights.proto."""
    base, payload = stored(vector("full")[1]), stored(vector("delta")[1])
    expected = stored(vector("full_after_delta")[1])
    seen = set()
    for info in vector("delta")[0].tensors:
        match info.encoding:
            case pb.TENSOR_ENCODING_DENSE:
                data = payload[info.name]
            case pb.TENSOR_ENCODING_UNCHANGED:
                data = base[info.name]
            case pb.TENSOR_ENCODING_XOR_ZSTD:
                flips = zstandard.ZstdDecompressor().decompress(payload[info.name])
                data = bytes(a ^ b for a, b in zip(base[info.name], flips, strict=True))
            case _:
                data = decode(payload[info.name], base[info.name], info.dtype)
        assert data == expected[info.name] and xxhash.xxh3_64_intdigest(data) == info.digest
        seen.add(info.encoding)
    assert seen == set(pb.TensorEncoding.values()) - {pb.TENSOR_ENCODING_UNSPECIFIED}


def test_the_vectors_are_what_this_library_reads() -> None:
    for name in VECTORS:
        check_manifest(vector(name)[0])
    manifest, payload = vector("full")
    base = Fetched(manifest, decode_payload(memoryview(payload), manifest))
    manifest, payload = vector("delta")
    tensors = apply_delta(memoryview(payload), manifest, base)
    whole = stored(vector("full_after_delta")[1])
    assert {name: bytes(one.data) for name, one in tensors.items()} == whole


@pytest.mark.parametrize("name", ["every", "gaps"])
def test_the_vectors_are_what_this_library_writes(name: str) -> None:
    """Those without zstd, whose bytes are a matter of its release."""
    dtype = {"every": "BF16", "gaps": "F32"}[name]
    base, new = stored(vector("full")[1])[name], stored(vector("full_after_delta")[1])[name]
    assert b"".join(sparse.encode(base, new, dtype)) == stored(vector("delta")[1])[name]


@pytest.mark.parametrize("dtype", sorted(WIDTHS))
@settings(max_examples=20)
@given(st.data(), st.integers(0, 400))
def test_what_this_library_writes_is_read_by_the_contract(
    dtype: str, data: st.DataObject, count: int
) -> None:
    width = WIDTHS[dtype]
    base = data.draw(st.binary(min_size=count * width, max_size=count * width))
    new = bytearray(base)
    for place in data.draw(st.lists(st.integers(0, max(0, count - 1)), max_size=30)) if count else []:
        new[place * width] = data.draw(st.integers(0, 255))
        new[place * width + width - 1] ^= data.draw(st.sampled_from([0, 1, 128]))
    assert decode(b"".join(sparse.encode(base, bytes(new), dtype)), base, dtype) == new


def test_a_second_segment_begins_where_the_contract_says() -> None:
    base = bytes(SEGMENT + 9)
    new = base[:-2] + b"\1\0"
    assert decode(b"".join(sparse.encode(base, new, "U8")), base, "U8") == new
    new = b"\1" + base[1:]
    assert decode(b"".join(sparse.encode(base, new, "U8")), base, "U8") == new
