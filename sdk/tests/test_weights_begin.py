"""What a Fetch waits for before its first byte, and what its reader hears meanwhile (service.py 5)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from quartet.v1 import weights_pb2 as pb
from quartet.weights import arrival
from quartet.weights.frames import Chunk, decode_frame
from quartet.weights.payload import Digests
from quartet.weights.service import WeightServicer
from quartet.weights.store import WeightStore
from weight_plane import model

LIMIT_S = 30.0


async def test_a_reader_hears_that_a_payload_is_hashed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that is silent for five seconds is passed over, and some GiB that came as deltas, or through
    shared memory, take as long."""
    monkeypatch.setattr(arrival, "SIGN_SECONDS", 0.01)
    store = WeightStore(keep=1)
    store.publish("r", 1, model())
    payload, may_hash = store.get("r", 1).payload, threading.Event()
    digests = payload.digests

    def slow() -> Digests:
        assert may_hash.wait(LIMIT_S)
        return digests()

    monkeypatch.setattr(payload, "digests", slow)
    context: Any = None
    frames = WeightServicer(store).fetch_encoded(pb.FetchRequest(run_id="r", version=1, offset=5), context)
    async with asyncio.timeout(LIMIT_S):
        for _ in range(3):
            sign = decode_frame(await anext(frames))
            assert isinstance(sign, Chunk) and (sign.offset, sign.data) == (5, b"")
        may_hash.set()
        *chunks, end = [decode_frame(frame) async for frame in frames]
    came = b"".join(chunk.data for chunk in chunks if isinstance(chunk, Chunk))
    assert came == b"".join(payload.slices(5, payload.size)) and end == payload.end()


async def test_a_delta_at_hand_does_not_wait_for_one_that_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a full payload, for a base from which no road leads: a relay has seconds to say which."""
    store = WeightStore(keep=2)
    for version in (0, 1):
        store.publish("r", version, {**model(), "norm": model(version)["norm"]})
    at = (0, bytes(store.get("r", 0).manifest.digest))
    delta = store.road("r", 1, at)
    assert delta.manifest.HasField("base_version")

    async def busy(*_: object) -> Any:
        await asyncio.Event().wait()

    servicer, context = WeightServicer(store), Any
    monkeypatch.setattr(servicer, "_in_thread", busy)
    request = pb.FetchRequest(run_id="r", version=1, base_version=0, base_digest=at[1])
    asked = pb.GetManifestRequest(run_id="r", version=1, base_version=0)
    async with asyncio.timeout(LIMIT_S):
        for digest, manifest in ((at[1], delta.manifest), (b"another", store.get("r", 1).manifest)):
            asked.base_digest = digest
            for asked.shared_memory in (False, True):
                assert (await servicer.GetManifest(asked, context)).manifest == manifest
        frames = [decode_frame(frame) async for frame in servicer.fetch_encoded(request, context)]
    assert [frame.data for frame in frames if isinstance(frame, Chunk) and frame.data] == [
        b"".join(delta.payload.parts)
    ]
