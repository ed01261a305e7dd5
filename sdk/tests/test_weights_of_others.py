"""Versions that others made are handed on with a manifest that is of the payload: their safetensors files may
begin with another header than ours, of another size."""

from __future__ import annotations

from push_taker import Taker
from quartet.kit.channel import connect
from quartet.weights.fetch import fetch_version
from quartet.weights.fetched import Fetched
from quartet.weights.payload import decode_payload
from quartet.weights.store import WeightStore
from test_weights_push_by_others import WEIGHTS, frames_of, manifest_of, payload_of


async def test_a_version_that_others_pushed_is_handed_on(taker: Taker) -> None:
    payload = payload_of(WEIGHTS)
    manifest = manifest_of(WEIGHTS, payload)
    await taker.send(frames_of(manifest, payload))
    held = taker.store.get("theirs", 3)
    assert held.payload.size != len(payload), "or the test says nothing"
    assert held.manifest.payload_bytes == held.payload.size
    async with connect(taker.address) as channel:
        fetched = await fetch_version(channel, "theirs", 3)
    assert fetched.manifest.digest == manifest.digest


async def test_a_version_that_others_published_is_handed_on() -> None:
    payload = payload_of(WEIGHTS)
    manifest = manifest_of(WEIGHTS, payload)
    held = WeightStore(keep=2).hold(Fetched(manifest, decode_payload(payload, manifest)))
    assert held.manifest.payload_bytes == held.payload.size != len(payload)
    assert held.manifest.digest == manifest.digest
