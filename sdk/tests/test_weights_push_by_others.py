"""Push by a client that has the contract and nothing else: what the comments of weights.proto say is enough.

Whoever pushes from Go or Rust has no `quartet.weights`; nothing here imports it but to look at what arrived.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from push_taker import Taker, frames
from quartet.errors import QuartetError
from quartet.kit import tracing
from quartet.v1 import weights_pb2 as pb
from span_collector import collecting_here
from test_kit_unknown import with_switch

WEIGHTS = {
    "embed.weight": np.arange(700 * 512, dtype=np.float32).reshape(700, 512),
    "norm.weight": np.ones(512, np.float32),
    "scale": np.float32(3).reshape(()),
}


def payload_of(weights: dict[str, np.ndarray]) -> bytes:
    """A safetensors file, as any library writes it: here another order, and blanks in the header."""
    header, data = {}, b""
    for name, values in reversed(weights.items()):
        places = [len(data), len(data) + values.nbytes]
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": places}
        data += values.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def manifest_of(weights: dict[str, np.ndarray], payload: bytes) -> pb.WeightManifest:
    manifest = pb.WeightManifest(run_id="theirs", version=3, payload_bytes=len(payload))
    digest, signature = xxhash.xxh3_128(), xxhash.xxh3_128()
    for name in sorted(weights):
        values = weights[name]
        own = xxhash.xxh3_64(values.tobytes()).intdigest()
        layout = f"{name}\0F32\0{','.join(map(str, values.shape))}\0".encode()
        digest.update(layout + struct.pack(">Q", own))
        signature.update(layout)
        dense = pb.TENSOR_ENCODING_DENSE
        manifest.tensors.add(name=name, dtype="F32", shape=values.shape, digest=own, encoding=dense)
    manifest.digest, manifest.layout_signature = digest.digest(), signature.hexdigest()
    checked = f"theirs\0{3}\0\0{len(payload)}\0".encode() + manifest.digest + b"\1" * len(weights)
    manifest.checksum = xxhash.xxh3_64(checked).intdigest()
    return manifest


def frames_of(manifest: pb.WeightManifest, payload: bytes) -> Iterator[pb.PushRequest]:
    yield pb.PushRequest(manifest=manifest)
    for offset in range(0, len(payload), 1 << 20):
        data = payload[offset : offset + (1 << 20)]
        checksum = xxhash.xxh3_64(data).intdigest()
        yield pb.PushRequest(chunk=pb.WeightChunk(offset=offset, data=data, checksum=checksum))
    digest = xxhash.xxh3_128(payload).digest()
    yield pb.PushRequest(commit=pb.WeightEnd(payload_bytes=len(payload), payload_digest=digest))


async def test_the_contract_says_enough_to_push(taker: Taker) -> None:
    payload = payload_of(WEIGHTS)
    answer = await taker.send(frames_of(manifest_of(WEIGHTS, payload), payload))
    assert answer.version == 3
    held = taker.store.get("theirs", 3)
    assert {name: bytes(tensor.data) for name, tensor in held.tensors.items()} == {
        name: values.tobytes() for name, values in WEIGHTS.items()
    }


@pytest.mark.parametrize("part", ["manifest", "chunk", "commit", "frame"])
async def test_what_a_newer_client_says_is_refused_and_not_passed_over(taker: Taker, part: str) -> None:
    """unknown.py 2, frames.py 4: frames of Push are read by no generated code."""
    sent = frames()
    at, field = {
        "manifest": (0, "WeightManifest"),
        "chunk": (1, "WeightChunk"),
        "commit": (-1, "WeightEnd"),
    }.get(part, (0, "PushRequest"))
    if part == "frame":
        sent[at] = with_switch(pb.PushRequest())
    else:
        getattr(sent[at], part).CopyFrom(with_switch(getattr(sent[at], part)))
    with pytest.raises(QuartetError, match="upgrade this service") as caught:
        await taker.send(iter(sent))
    assert caught.value.reason == "NOT_IMPLEMENTED"
    assert caught.value.metadata["field"] == f"{field}, field 999" and taker.versions() == []


async def test_the_span_of_a_push_says_whose_weights_they_are(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tracing.py 6."""
    with collecting_here(monkeypatch) as collector:
        with tracing.exporting("test"):
            await taker.send(iter(frames()))
        (span,) = collector.named("quartet.v1.WeightService/Push", "SERVER")
    assert span.attributes["quartet.run_id"] == "r"
