"""Encodings of a delta: lossless for every dtype and content, the smallest that was measured; not trusted."""

from __future__ import annotations

import os
import random
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from quartet.errors import QuartetError
from quartet.v1 import weights_pb2 as pb
from quartet.weights import encodings, sparse, xor
from quartet.weights.delta import Delta, apply_delta, make_delta
from quartet.weights.encodings import decode_tensor, encode_tensor
from quartet.weights.fetched import Fetched
from quartet.weights.layout import parse_header
from quartet.weights.manifest import build_manifest
from quartet.weights.payload import CHUNK_BYTES, full_payload
from quartet.weights.tensor import DTYPE_BYTES, Tensor, tensor_bytes

SEED = int(os.environ.get("QUARTET_SEED", random.SystemRandom().randrange(2**32)))
LARGE = 3 * sparse.SEGMENT_VALUES // 2


def joined(parts: list[memoryview | bytes] | list[bytes]) -> memoryview:
    return memoryview(b"".join(parts))


def bf16(count: int, seed: int = 0) -> np.ndarray:
    """Weights as models have them, cast to bfloat16, as their bits."""
    values = np.random.default_rng(seed).standard_normal(count, np.float32) * 0.02
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def moved(bits: np.ndarray, share: float, seed: int = 1, steps: int = 1) -> np.ndarray:
    """So many of the values a few representable numbers up or down."""
    rng = np.random.default_rng(seed)
    by = (
        rng.integers(1, steps + 1, len(bits))
        * rng.choice([-1, 1], len(bits))
        * (rng.random(len(bits)) < share)
    )
    # Towards larger and smaller magnitudes: the sign bit never changes at 0.02 standard deviations.
    return (bits.astype(np.int64) + by).astype(np.uint16)


def tensor(bits: np.ndarray) -> Tensor:
    return Tensor("BF16", (len(bits),), bits.data)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two tensors of any dtype, alike in some of their values."""
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    count = draw(st.integers(0, 700))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = tensor_bytes(dtype, (count,))
    base = rng.integers(0, 256, size, np.uint8)
    new = base.copy()
    width = DTYPE_BYTES[dtype]
    hit = np.repeat(rng.random(count) < draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])), width)
    new[hit] += rng.integers(0, draw(st.sampled_from([2, 256])), int(hit.sum()), np.uint8)
    return Tensor(dtype, (count,), base.data), Tensor(dtype, (count,), new.data)


@settings(max_examples=300)
@given(pairs())
def test_every_encoding_is_lossless_for_every_dtype(pair: tuple[Tensor, Tensor]) -> None:
    base, new = pair
    sizes = [new.nbytes]
    for encoding, parts in (
        (pb.TENSOR_ENCODING_SPARSE, sparse.encode(base.data, new.data, new.dtype)),
        (pb.TENSOR_ENCODING_XOR_ZSTD, xor.encode(base.data, new.data)),
    ):
        out = np.empty(new.nbytes, np.uint8)
        decode_tensor(encoding, joined(parts), base, out.data)
        assert out.tobytes() == bytes(new.data)
        sizes.append(len(joined(parts)))
    assert encode_tensor(base, new).size == min(sizes), "encodings.py 2: small ones are encoded both ways"


@pytest.mark.parametrize("share", [0.0, 0.0003, 0.01, 0.14, 0.16, 0.4, 1.0])
@pytest.mark.parametrize("steps", [1, 300])
def test_large_tensors_of_several_segments(share: float, steps: int) -> None:
    base = bf16(LARGE)
    new = moved(base, share, steps=steps)
    out = np.empty_like(base)
    blob = joined(sparse.encode(base.data, new.data, "BF16"))
    sparse.decode(blob, base.data, "BF16", memoryview(out).cast("B"))
    assert np.array_equal(out, new)


@pytest.mark.parametrize("changed", [slice(0, sparse.BLOCK_VALUES), slice(sparse.BLOCK_VALUES, None)])
def test_a_segment_whose_first_block_is_unlike_the_rest(changed: slice) -> None:
    base = np.zeros(2 * sparse.SEGMENT_VALUES + 3, np.uint16)
    new = base.copy()
    new[changed] += 1
    parts = sparse.encode(base.data.cast("B"), new.data.cast("B"), "BF16")
    out = np.empty_like(base)
    sparse.decode(memoryview(b"".join(parts)), base.data.cast("B"), "BF16", out.data.cast("B"))
    assert np.array_equal(out, new)
    assert sum(map(len, parts)) < 0.001 * base.nbytes


def test_gaps_of_every_length_around_the_escape() -> None:
    base = np.zeros(20_000, np.uint16)
    new = base.copy()
    for start, gap in enumerate((0, 1, 253, 254, 255, 256, 509, 510, 511, 2000)):
        new[start * 2000] ^= 1
        new[start * 2000 + min(gap, 1999)] ^= 4
    new[-1] ^= 1
    out = np.empty_like(base)
    blob = joined(sparse.encode(base.data, new.data, "U16"))
    sparse.decode(blob, base.data, "U16", memoryview(out).cast("B"))
    assert np.array_equal(out, new)


def test_one_percent_of_changed_values_costs_less_than_one_percent_of_the_bytes() -> None:
    base = bf16(LARGE)
    encoded = encode_tensor(tensor(base), tensor(moved(base, 0.01)))
    assert encoded.encoding == pb.TENSOR_ENCODING_SPARSE
    assert encoded.size <= 0.0065 * 2 * LARGE


def xored(base: np.ndarray, new: np.ndarray, level: int) -> int:
    """Size of zstd(XOR), and of the empty block that closes a frame written piece by piece."""
    return len(zstandard.ZstdCompressor(level=level).compress((base ^ new).data)) + 3


def test_at_forty_percent_it_is_never_larger_than_the_best_of_xor_and_dense() -> None:
    base = bf16(LARGE)
    everywhere = moved(base, 0.4, steps=3)
    patterned = np.where(np.arange(LARGE) % 5 < 2, base ^ 0x5A5A, base)
    rng = np.random.default_rng(5)
    random_new = np.where(rng.random(LARGE) < 0.4, rng.integers(0, 65536, LARGE, np.uint16), base)
    for new in (everywhere, patterned, random_new):
        encoded = encode_tensor(tensor(base), tensor(new))
        assert encoded.size <= min(xored(base, new, 1), xored(base, new, 3) * 1.01, 2 * LARGE)
    assert encode_tensor(tensor(base), tensor(patterned)).encoding == pb.TENSOR_ENCODING_XOR_ZSTD


def test_a_change_that_the_sample_does_not_see_is_still_carried_best() -> None:
    base = bf16(LARGE)
    # Pieces lie evenly: between two of them a stretch is repainted in a pattern that only XOR compresses.
    new = base.copy()
    new[5000:60_000] ^= 0x5A5A
    encoded = encode_tensor(tensor(base), tensor(new))
    assert encoded.size <= xored(base, new, 1)


def test_where_a_sample_is_not_clear_both_ways_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """encodings.py 2"""
    monkeypatch.setattr(encodings, "CLEARLY", 0.0)
    base = bf16(encodings.SMALL_BYTES)
    for new in (moved(base, 0.01), np.where(np.arange(len(base)) % 5 < 2, base ^ 0x5A5A, base)):
        sizes = [len(joined(sparse.encode(base.data, new.data, "BF16")))]
        sizes.append(len(joined(xor.encode(base.data, new.data))))
        assert encode_tensor(tensor(base), tensor(new)).size == min(sizes) < max(sizes)


def test_noise_and_what_has_no_base_are_carried_dense() -> None:
    base, noise = bf16(50_000), np.random.default_rng(3).integers(0, 65536, 50_000, np.uint16)
    assert encode_tensor(tensor(base), tensor(noise)).encoding == pb.TENSOR_ENCODING_DENSE
    assert encode_tensor(None, tensor(base)).encoding == pb.TENSOR_ENCODING_DENSE
    assert encode_tensor(tensor(base[:-1]), tensor(base)).encoding == pb.TENSOR_ENCODING_DENSE


def test_encoding_is_a_function_of_base_and_tensor() -> None:
    base = bf16(LARGE)
    new = moved(base, 0.2, steps=9)
    assert joined(encode_tensor(tensor(base), tensor(new)).parts) == joined(
        encode_tensor(tensor(base.copy()), tensor(new.copy())).parts
    )


def test_scratch_memory_is_bounded_by_a_segment_and_not_by_the_tensor() -> None:
    peaks = []
    for segments in (2, 6):
        base = bf16(segments * sparse.SEGMENT_VALUES)
        new = moved(base, 0.01)
        tracemalloc.start()
        parts = sparse.encode(base.data, new.data, "BF16")
        peaks.append(tracemalloc.get_traced_memory()[1] - sum(map(len, parts)))
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


@settings(max_examples=400)
@given(st.data())
def test_damaged_blobs_are_refused_or_decode_within_their_bounds(data: st.DataObject) -> None:
    share = data.draw(st.sampled_from([0.05, 0.5]))
    base = bf16(2000)
    new = moved(base, share, steps=data.draw(st.sampled_from([1, 400])))
    encoding = data.draw(st.sampled_from([pb.TENSOR_ENCODING_SPARSE, pb.TENSOR_ENCODING_XOR_ZSTD]))
    parts = (
        sparse.encode(base.data, new.data, "BF16")
        if encoding == pb.TENSOR_ENCODING_SPARSE
        else xor.encode(base.data, new.data)
    )
    blob = bytearray(b"".join(parts))
    at = data.draw(st.integers(0, len(blob) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "double", "noise"])):
        case "flip":
            blob[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del blob[at:]
        case "double":
            blob += bytes(blob)
        case "noise":
            blob[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    whole = np.zeros(3 * len(base), np.uint16)
    out = whole[len(base) : -len(base)]
    with suppress(ValueError):
        decode_tensor(encoding, memoryview(bytes(blob)), tensor(base), memoryview(out).cast("B"))
    assert not whole[: len(base)].any() and not whole[-len(base) :].any()


def test_a_stream_that_claims_more_than_is_due_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    head = sparse._HEAD.pack(sparse.EVERY, 100, 0)
    blob = head + sparse._SIZE.pack(len(bomb) | sparse._COMPRESSED) + bomb
    tracemalloc.start()
    with pytest.raises(ValueError, match="67108864 bytes where 25 are due"):
        sparse.decode(memoryview(blob), bytes(200), "BF16", memoryview(bytearray(200)))
    with pytest.raises(ValueError, match="longer"):
        xor.decode(memoryview(bomb), bytes(200), memoryview(bytearray(200)))
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("form", "listed", "escaped"),
    [
        (max(sparse.GAPS, sparse.EVERY) + 1, 100, 0),
        (sparse.EVERY, 99, 0),
        (sparse.EVERY, 101, 0),
        (sparse.EVERY, 100, 1 << 31),
        (sparse.GAPS, 0, 0),
        (sparse.GAPS, 5, 6),
        (sparse.GAPS, 1 << 31, 1 << 31),
    ],
)
def test_a_segment_that_claims_what_its_tensor_cannot_have_is_not_begun(
    form: int, listed: int, escaped: int
) -> None:
    blob = memoryview(sparse._HEAD.pack(form, listed, escaped))
    with pytest.raises(ValueError, match=f"{listed} (values, {escaped} of them escaped, )?of 100"):
        sparse.decode(blob, bytes(200), "BF16", memoryview(bytearray(200)))


def test_what_follows_the_last_segment_is_refused() -> None:
    base = bf16(100)
    blob = joined([*sparse.encode(base.data, moved(base, 0.1).data, "BF16"), b"\0"])
    with pytest.raises(ValueError, match="1 bytes follow"):
        sparse.decode(blob, bytes(base.data), "BF16", memoryview(bytearray(200)))


def test_what_is_no_frame_of_the_tensors_size_is_refused() -> None:
    """xor.py 3"""
    base = bf16(100)
    frame = b"".join(xor.encode(base.data, moved(base, 0.5).data))
    less = b"".join(xor.encode(base[1:].data, base[1:].data))
    for blob, why in ((frame + frame, "longer"), (less, "shorter"), (frame[1:], None), (frame + b"x", None)):
        with pytest.raises(ValueError, match=why):
            xor.decode(memoryview(blob), bytes(base.data), memoryview(bytearray(200)))


def version(number: int, tensors: dict[str, Tensor]) -> Fetched:
    return Fetched(build_manifest("r", number, tensors), tensors)


def received(delta: Delta) -> memoryview:
    return joined([*delta.payload.parts])


def test_a_delta_of_a_model_with_every_kind_of_tensor() -> None:
    """All sorts of dtypes, odd and empty shapes, scalars; tensors that appear, vanish, change their shape."""
    rng = np.random.default_rng(2)
    f32 = rng.standard_normal((33, 17), np.float32)
    before = {
        "a": tensor(bf16(3 * CHUNK_BYTES)),
        "b": Tensor("F32", (33, 17), f32.data),
        "empty": Tensor("F16", (0, 4), b""),
        "scalar": Tensor("I64", (), (7).to_bytes(8, "little")),
        "flag": Tensor("BOOL", (3,), b"\0\1\0"),
        "same": tensor(bf16(999)),
        "gone": tensor(bf16(10)),
        "reshaped": Tensor("U8", (2, 3), bytes(6)),
    }
    after = dict(before)
    del after["gone"]
    after["a"] = tensor(moved(bf16(3 * CHUNK_BYTES), 0.01))
    after["b"] = Tensor("F32", (33, 17), (f32 * np.float32(1.0001)).data)
    after["scalar"] = Tensor("I64", (), (8).to_bytes(8, "little"))
    after["flag"] = Tensor("BOOL", (3,), b"\0\0\0")
    after["reshaped"] = Tensor("U8", (3, 2), bytes(6))
    after["new"] = tensor(bf16(77))
    base, new = version(1, before), version(2, after)
    delta = make_delta(base, new)
    assert apply_delta(received(delta), delta.manifest, base) == after
    carried = {info.name: info.encoding for info in delta.manifest.tensors}
    assert carried["a"] == pb.TENSOR_ENCODING_SPARSE
    assert carried["same"] == carried["empty"] == pb.TENSOR_ENCODING_UNCHANGED
    assert carried["new"] == carried["reshaped"] == pb.TENSOR_ENCODING_DENSE
    assert (delta.manifest.digest, delta.manifest.layout_signature) == (
        new.manifest.digest,
        new.manifest.layout_signature,
    )


def test_one_flipped_bit_of_a_delta_is_never_other_weights() -> None:
    """Invariant 3."""
    print(f"QUARTET_SEED={SEED}")
    rng = random.Random(SEED)
    base = version(1, {"a": tensor(bf16(3000)), "b": tensor(bf16(500, 1)), "c": tensor(bf16(400, 2))})
    after = {
        "a": tensor(moved(bf16(3000), 0.02)),
        "b": tensor(moved(bf16(500, 1), 0.6, steps=500)),
        "c": tensor(bf16(400, 2)),
    }
    delta = make_delta(base, version(2, after))
    clean = received(delta)
    for _ in range(1500):
        damaged = bytearray(clean)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            assert apply_delta(memoryview(damaged), delta.manifest, base) == after
        except QuartetError as error:
            assert error.reason == "CHECKSUM_MISMATCH"


def test_a_delta_whose_payload_is_not_what_its_manifest_says_is_refused() -> None:
    base = version(1, {"a": tensor(bf16(3000))})
    delta = make_delta(base, version(2, {"a": tensor(moved(bf16(3000), 0.02)), "b": tensor(bf16(77))}))
    carried = {
        name: Tensor(one.dtype, one.shape, received(delta)[one.begin : one.end])
        for name, one in parse_header(received(delta)).items()
    }

    def applied(manifest: pb.WeightManifest, tensors: dict[str, Tensor]) -> None:
        payload = memoryview(b"".join(full_payload(tensors).parts))
        manifest.payload_bytes = len(payload)
        with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH"):
            apply_delta(payload, manifest, base)

    manifest = pb.WeightManifest()
    manifest.CopyFrom(delta.manifest)
    applied(manifest, carried | {"more": Tensor("U8", (3,), bytes(3))})
    applied(manifest, carried | {"b": tensor(bf16(78))})
    # Relative to a base that does not have it.
    manifest.tensors[1].encoding = pb.TENSOR_ENCODING_SPARSE
    applied(manifest, carried)
    manifest.tensors[1].encoding, manifest.tensors[0].encoding = pb.TENSOR_ENCODING_DENSE, 99
    applied(manifest, carried)


def test_a_delta_is_refused_on_another_base() -> None:
    base = version(1, {"a": tensor(bf16(3000))})
    delta = make_delta(base, version(2, {"a": tensor(moved(bf16(3000), 0.02))}))
    other = version(1, {"a": tensor(bf16(3000, 9))})
    lying = Fetched(base.manifest, other.tensors)
    for wrong in (other, version(3, base.tensors), lying):
        with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH"):
            apply_delta(received(delta), delta.manifest, wrong)
