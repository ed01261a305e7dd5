"""Tensors, layouts, manifests and payloads, without a wire: the docstrings of quartet.weights.* hold."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from quartet.errors import QuartetError
from quartet.v1 import weights_pb2 as pb
from quartet.weights import payload as module
from quartet.weights.layout import header_of, parse_header
from quartet.weights.manifest import (
    build_manifest,
    check_manifest,
    layout_signature,
    sealed,
    verify_tensor,
    weights_digest,
)
from quartet.weights.payload import CHUNK_BYTES, chunk_spans, chunks, decode_payload, full_payload
from quartet.weights.tensor import DTYPE_BYTES, Tensor, tensor_bytes

NAMES = st.text(min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__" and not any(0xD800 <= ord(letter) < 0xE000 for letter in name)
)


@st.composite
def tensors_of_any_kind(draw: st.DrawFn) -> dict[str, Tensor]:
    tensors = {}
    for name in draw(st.lists(NAMES, max_size=6, unique=True)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        size = tensor_bytes(dtype, shape)
        tensors[name] = Tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))
    return tensors


def whole(tensors: dict[str, Tensor]) -> bytearray:
    return bytearray(b"".join(chunk.data for chunk in chunks(full_payload(tensors))))


def example() -> dict[str, Tensor]:
    return {
        "b.weight": Tensor("F32", (2, 3), np.arange(6, dtype="<f4").data),
        "a.weight": Tensor("BF16", (3,), b"\1\2\3\4\5\6"),
        "empty": Tensor("F16", (0, 4), b""),
        "scalar": Tensor("I64", (), (7).to_bytes(8, "little")),
    }


@settings(max_examples=200)
@given(tensors_of_any_kind())
def test_a_payload_decodes_to_the_same_tensors(tensors: dict[str, Tensor]) -> None:
    manifest = build_manifest("run", 3, tensors)
    check_manifest(manifest)
    payload = full_payload(tensors)
    assert payload.size == manifest.payload_bytes == len(whole(tensors))
    assert payload.digests().whole == xxhash.xxh3_128_digest(bytes(whole(tensors)))
    decoded = decode_payload(whole(tensors), manifest)
    assert decoded == tensors


@settings(max_examples=100)
@given(tensors_of_any_kind(), st.data())
def test_one_flipped_bit_anywhere_is_never_decoded_as_other_weights(
    tensors: dict[str, Tensor], data: st.DataObject
) -> None:
    manifest = build_manifest("run", 3, tensors)
    damaged = whole(tensors)
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decoded = decode_payload(damaged, manifest)
    except QuartetError as error:
        assert error.reason == "CHECKSUM_MISMATCH"
    else:
        # Padding or metadata: covered by the digest of the whole payload, not by those of the tensors.
        assert decoded == tensors


@given(st.binary(max_size=200))
def test_noise_is_refused_with_a_typed_error(noise: bytes) -> None:
    manifest = build_manifest("run", 0, example())
    manifest.payload_bytes = len(noise)
    with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH"):
        decode_payload(noise, manifest)


def test_more_tensors_than_a_manifest_has_room_for_are_refused() -> None:
    """Invariant 8."""
    one = Tensor("U8", (1,), b"1")
    with pytest.raises(QuartetError, match=r"the manifest of 7000 tensors has .* publish fewer") as told:
        names = [f"model.layers.0.mlp.experts.{index}.{'nested.' * 80}weight" for index in range(7_000)]
        build_manifest("run", 1, dict.fromkeys(names, one))
    assert told.value.reason == "INVALID_REQUEST"


def test_a_payload_is_a_file_that_the_safetensors_library_reads() -> None:
    load = pytest.importorskip("safetensors.numpy").load
    tensors = {name: tensor for name, tensor in example().items() if tensor.dtype != "BF16"}
    read = load(bytes(whole(tensors)))
    assert read.keys() == tensors.keys()
    assert read["b.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read["scalar"] == 7


def test_every_tensor_is_aligned_to_its_elements() -> None:
    tensors = example() | {f"odd{i}": Tensor("U8", (i,), bytes(i)) for i in range(1, 9)}
    for extent in parse_header(memoryview(whole(tensors))).values():
        assert extent.begin % DTYPE_BYTES[extent.dtype] == 0


def test_decoded_tensors_and_payload_parts_are_views_not_copies() -> None:
    source = np.arange(8, dtype="<f4")
    tensors = {"w": Tensor("F32", (8,), source.data)}
    payload, manifest, buffer = full_payload(tensors), build_manifest("r", 0, tensors), whole(tensors)
    decoded = decode_payload(buffer, manifest)
    source[0] = 42.0
    assert np.frombuffer(payload.parts[1], "<f4")[0] == 42.0
    buffer[-4:] = b"\0\0\0\0"
    assert np.frombuffer(decoded["w"].data, "<f4")[-1] == 0.0
    with pytest.raises(TypeError):
        payload.parts[1][0] = 0


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5])
@pytest.mark.parametrize("offset", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 7])
def test_chunks_cover_the_rest_without_gaps_and_end_on_the_grid(size: int, offset: int) -> None:
    spans = list(chunk_spans(size, offset))
    covered = [offset, *(end for _, end in spans)]
    assert [begin for begin, _ in spans] == covered[:-1]
    assert covered[-1] == max(size, offset)
    assert all(end % CHUNK_BYTES == 0 for _, end in spans[:-1])
    assert all(0 < end - begin <= CHUNK_BYTES for begin, end in spans)


@pytest.mark.parametrize("offset", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 3, 2 * CHUNK_BYTES])
def test_a_payload_from_any_offset_is_the_same_bytes(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    sizes = (7, CHUNK_BYTES, 1, CHUNK_BYTES // 2, 13)
    tensors = {f"t{i}": Tensor("U8", (n,), rng.bytes(n)) for i, n in enumerate(sizes)}
    payload = full_payload(tensors)
    rest = list(chunks(payload, offset))
    assert b"".join(chunk.data for chunk in rest) == bytes(whole(tensors))[offset:]
    assert all(chunk.checksum == xxhash.xxh3_64_intdigest(chunk.data) for chunk in rest)
    payload.digests()
    hashed: list[int] = []
    checksum = module._checksum

    def hashing(views: list[memoryview]) -> int:
        hashed.append(sum(map(len, views)))
        return checksum(views)

    monkeypatch.setattr(module, "_checksum", hashing)
    sent = list(payload.encoded_chunks(offset))
    assert sent == [pb.FetchResponse(chunk=chunk).SerializeToString() for chunk in rest]
    assert len(hashed) == (offset % CHUNK_BYTES > 0), "only a part of a chunk has a checksum of its own"


def test_digests_name_weights_and_signatures_name_layouts() -> None:
    base = build_manifest("run", 1, example())
    again = build_manifest("other", 2, dict(reversed(example().items())))
    assert (base.digest, base.layout_signature) == (again.digest, again.layout_signature)
    changed = build_manifest("run", 1, example() | {"a.weight": Tensor("BF16", (3,), b"\1\2\3\4\5\7")})
    assert changed.digest != base.digest and changed.layout_signature == base.layout_signature
    reshaped = build_manifest("run", 1, example() | {"a.weight": Tensor("BF16", (3, 1), b"\1\2\3\4\5\6")})
    assert reshaped.digest != base.digest and reshaped.layout_signature != base.layout_signature
    assert len(base.digest) == 16 and [info.name for info in base.tensors] == sorted(example())


def test_the_digest_is_what_the_contract_says_it_is() -> None:
    manifest = build_manifest("run", 0, {"w": Tensor("F16", (2, 1), b"abcd")})
    digest = xxhash.xxh3_64(b"abcd").digest()
    assert manifest.digest == xxhash.xxh3_128(b"w\0F16\x002,1\0" + digest).digest()
    assert manifest.layout_signature == xxhash.xxh3_128(b"w\0F16\x002,1\0").hexdigest()


def spoil(manifest: pb.WeightManifest, field: str) -> None:
    match field:
        case "digest":
            manifest.digest = b"\0" * 16
        case "tensor":
            manifest.tensors[0].digest ^= 1
        case "shape":
            manifest.tensors[0].shape[0] += 1
        case "order":
            manifest.tensors.append(manifest.tensors[0])
        case "dtype":
            manifest.tensors[0].dtype = "F33"
        case "size":
            manifest.payload_bytes = 1 << 40
        case "signature":
            manifest.layout_signature = "0"
        case "encoding":
            manifest.tensors[0].encoding = pb.TENSOR_ENCODING_SPARSE


@pytest.mark.parametrize(
    "field", ["digest", "tensor", "shape", "order", "dtype", "size", "signature", "encoding"]
)
@pytest.mark.parametrize("seal", [sealed, lambda manifest: manifest])
def test_a_manifest_that_contradicts_itself_is_refused(field: str, seal: Any) -> None:
    manifest = build_manifest("run", 0, example())
    check_manifest(manifest)
    spoil(manifest, field)
    seal(manifest)
    with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH"):
        check_manifest(manifest)


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_manifest_of_a_tensor_that_no_header_can_name_is_refused(is_delta: bool) -> None:
    """Where it agrees with itself in all else."""
    manifest = build_manifest("run", 1, example())
    if is_delta:
        manifest.base_version, manifest.base_digest = 0, bytes(16)
    manifest.tensors[0].name = "__metadata__"
    manifest.digest = weights_digest(manifest.tensors)
    manifest.layout_signature = layout_signature(manifest.tensors)
    with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH: tensor named __metadata__"):
        check_manifest(sealed(manifest))


def other_run(manifest: pb.WeightManifest) -> None:
    manifest.run_id = "other"


def other_version(manifest: pb.WeightManifest) -> None:
    manifest.version += 1


def other_base(manifest: pb.WeightManifest) -> None:
    manifest.base_version = 0


def other_canary(manifest: pb.WeightManifest) -> None:
    manifest.canary.logprobs[1] += 0.5


def no_canary(manifest: pb.WeightManifest) -> None:
    manifest.ClearField("canary")


def other_adapter(manifest: pb.WeightManifest) -> None:
    manifest.adapter_config += " "


@pytest.mark.parametrize(
    "damage", [other_run, other_version, other_base, other_canary, no_canary, other_adapter]
)
def test_nothing_of_a_manifest_can_change_on_its_way(damage: Any) -> None:
    """Invariant 3."""
    canary = pb.Canary(token_ids=[1, 2, 3], logprobs=[-0.5, -1.5])
    manifest = build_manifest("run", 5, example(), canary=canary, adapter_config="{}")
    check_manifest(manifest)
    damage(manifest)
    with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH"):
        check_manifest(manifest)


@pytest.mark.parametrize(
    "change",
    [
        {"a.weight": None},
        {"extra": Tensor("U8", (1,), b"x")},
        {"a.weight": Tensor("F16", (3,), b"\1\2\3\4\5\6")},
    ],
)
def test_a_payload_of_other_names_or_dtypes_is_refused(change: dict[str, Any]) -> None:
    manifest = build_manifest("run", 0, example())
    other = {name: tensor for name, tensor in (example() | change).items() if tensor is not None}
    buffer = whole(other)
    manifest.payload_bytes = len(buffer)
    with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH"):
        decode_payload(buffer, manifest)


@pytest.mark.parametrize(
    ("offsets", "data", "why"),
    [
        ([0, 2], 3, "end at byte"),
        ([1, 3], 3, "hole"),
        ([0, 3], 3, "has 2 bytes"),
        ([-2, 0], 0, "has 2 bytes"),
        (["0", 2], 2, "is not described"),
    ],
)
def test_headers_must_cover_the_data_exactly(offsets: list[Any], data: int, why: str) -> None:
    text = json.dumps({"w": {"dtype": "U8", "shape": [2], "data_offsets": offsets}}).encode()
    with pytest.raises(ValueError, match=why):
        parse_header(memoryview(len(text).to_bytes(8, "little") + text + bytes(data)))


def test_overlapping_tensors_are_refused() -> None:
    entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    text = json.dumps({"v": entry, "w": entry}).encode()
    with pytest.raises(ValueError, match="overlap"):
        parse_header(memoryview(len(text).to_bytes(8, "little") + text + bytes(2)))


def test_verify_tensor_compares_size_and_digest() -> None:
    info = build_manifest("run", 0, example()).tensors[0]
    verify_tensor(info, b"\1\2\3\4\5\6")
    for wrong in (b"\1\2\3\4\5\7", b"\1\2\3\4\5", b""):
        with pytest.raises(QuartetError, match=r"a\.weight"):
            verify_tensor(info, wrong)


def test_tensors_refuse_what_they_cannot_be() -> None:
    with pytest.raises(ValueError, match="has 8 bytes, not 7"):
        Tensor("F32", (2,), b"1234567")
    with pytest.raises(ValueError, match="not one of"):
        Tensor("F31", (2,), b"12345678")
    with pytest.raises(ValueError, match="not contiguous"):
        Tensor("F32", (2,), np.zeros((4,), "<f4")[::2].data)
    assert Tensor("F32", (2, 2), np.zeros((2, 2), "<f4").data).nbytes == 16
    assert header_of({})[2] == len(header_of({})[0])
