"""Digests of tensors that are taken while a payload passes, and what is hashed again where it lies."""

from __future__ import annotations

import random

import pytest
from quartet.errors import QuartetError
from quartet.v1 import weights_pb2 as pb
from quartet.weights import payload
from quartet.weights.layout import parse_header
from quartet.weights.manifest import build_manifest, tensor_digest
from quartet.weights.passing import PassingDigests
from quartet.weights.payload import decode_payload, full_payload
from quartet.weights.tensor import Tensor
from test_weights_fetch import damaged, torn_after
from weight_plane import Plane, model


def bytes_of(tensors: dict[str, Tensor]) -> bytes:
    return b"".join(full_payload(tensors).parts)


@pytest.mark.parametrize("seed", range(8))
def test_however_the_bytes_come_every_tensor_is_found_with_its_digest(seed: int) -> None:
    """passing.py 1 and 2."""
    rng = random.Random(seed)
    longest = (2, 3, 100, 5000)[seed % 4]
    kinds = [("U8", 1), ("BF16", 2), ("F32", 4)]
    tensors = {}
    for number in range(rng.randint(1, 12)):
        (dtype, width), count = rng.choice(kinds), rng.choice([0, 1, 5, 700])
        tensors[f"t{number}"] = Tensor(dtype, (count,), rng.randbytes(count * width))
    data = memoryview(bytes_of(tensors))
    passing, at = PassingDigests(build_manifest("r", 0, tensors)), 0
    expected = {
        (extent.begin, extent.end): tensor_digest(data[extent.begin : extent.end])
        for extent in parse_header(data).values()
        if extent.begin < extent.end
    }
    while at < len(data):
        assert all(end <= at for _, end in passing.found), "nothing is found before it has passed whole"
        size = rng.randint(1, longest)
        passing.update(at, data[at : at + size])
        at += size
    assert passing.found == expected


def test_digests_that_passed_do_not_make_other_weights_right() -> None:
    """invariant 3."""
    tensors, others = ({"w": Tensor("U8", (9,), bytes([value] * 9))} for value in (1, 2))
    buffer = bytes_of(others)
    passing = PassingDigests(build_manifest("r", 0, tensors))
    passing.update(0, memoryview(buffer))
    with pytest.raises(QuartetError, match="tensor w"):
        decode_payload(buffer, build_manifest("r", 0, tensors), passing.found)


async def test_what_passed_in_order_is_not_hashed_again(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[str] = []
    verify = payload.verify_tensor

    def verifying(info: pb.TensorInfo, data: memoryview) -> None:
        again.append(info.name)
        verify(info, data)

    monkeypatch.setattr(payload, "verify_tensor", verifying)
    plane.store.publish("r", 1, model())
    assert (await plane.fetch()).tensors == model() and again == []
    plane.servicer.faults = [torn_after(2)]
    assert (await plane.fetch()).tensors == model() and again == []
    plane.servicer.faults = [damaged(2)]
    assert (await plane.fetch()).tensors == model()
    assert again and set(again) < set(model()), "from the damaged chunk on"
