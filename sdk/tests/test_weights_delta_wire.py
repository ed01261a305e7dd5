"""Deltas over real gRPC: the cheapest road is taken, and what arrives is bit-equal whichever it was."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
from quartet.errors import QuartetError
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.weights import delta, fetch
from quartet.weights.fetch import fetch_version, get_manifest
from quartet.weights.fetched import Fetched
from quartet.weights.payload import Digests, Payload
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet.weights.versions import ANCHOR_EVERY

SHAPES = {"embed": (300, 500), "layer.0": (400, 400), "layer.1": (400, 400), "norm": (400,), "empty": (0, 3)}


def model(version: int, share: float = 0.01, steps: int = 1, keep: str = "layer.1") -> dict[str, Tensor]:
    """Version 0 is random; each later one moves that share of the values by so many steps or fewer."""
    bits = {
        name: np.random.default_rng(0).integers(0, 60000, shape, np.uint16) for name, shape in SHAPES.items()
    }
    for step in range(1, version + 1):
        rng = np.random.default_rng(step)
        for name, values in bits.items():
            if name != keep:
                moved = rng.random(values.shape) < share
                values += moved * rng.integers(1, steps + 1, values.shape, np.uint16)
    return {name: Tensor("BF16", SHAPES[name], values.data) for name, values in bits.items()}


class Plane:
    """A publisher that keeps two versions, and a channel to it."""

    def __init__(self, store: WeightStore, channel: grpc.aio.Channel) -> None:
        self.store, self.channel = store, channel

    def publish(self, *versions: int, share: float = 0.01, steps: int = 1) -> None:
        for version in versions:
            self.store.publish("r", version, model(version, share, steps))

    async def fetch(self, version: int | None, base: Fetched | None = None) -> Fetched:
        return await fetch_version(self.channel, "r", version, base)


@pytest.fixture
async def plane(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plane]:
    monkeypatch.setattr(fetch, "BACKOFF_SECONDS", (0.001, 0.01))
    store = WeightStore(keep=2)
    server = await start(
        [Service(SERVICE, add_weight_service, WeightServicer(store))], ServerConfig(), Health()
    )
    channel = connect(server.address, bulk=True)
    yield Plane(store, channel)
    await channel.close()
    await server.stop(0)


async def test_a_delta_is_small_and_what_it_leads_to_is_bit_equal(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "COPIED_BELOW_BYTES", 1000)
    plane.publish(0, 1)
    base = await plane.fetch(0)
    for version in (1, None):
        fetched = await plane.fetch(version, base)
        assert fetched.tensors == model(1)
        assert fetched.manifest == plane.store.get("r", 1).manifest
        assert fetched.received_bytes < 0.02 * fetched.manifest.payload_bytes
        assert [one.base[0] for one in fetched.deltas] == [0]
    # What did not change is not copied.
    assert fetched.tensors["layer.1"].data.obj is base.tensors["layer.1"].data.obj
    assert fetched.tensors["norm"].data.obj is not base.tensors["norm"].data.obj
    assert (await plane.fetch(1)).tensors == model(1)


async def test_a_reader_whose_base_is_gone_takes_the_chain_of_deltas(plane: Plane) -> None:
    plane.publish(0)
    old = held = await plane.fetch(0)
    for version in range(1, 5):
        plane.publish(version)
        held = await plane.fetch(version, held)
    # The store holds 3 and 4, and the deltas that were asked for.
    fetched = await plane.fetch(4, old)
    assert fetched.tensors == model(4) and fetched.manifest == held.manifest
    assert [int(one.manifest.version) for one in fetched.deltas] == [1, 2, 3, 4]
    assert fetched.received_bytes < 0.1 * fetched.manifest.payload_bytes
    # The newest is never reached by a chain: its reader would not know when it is there.
    assert (await plane.fetch(None, old)).deltas == ()


async def test_a_chain_goes_on_from_a_held_version_by_a_new_delta(plane: Plane) -> None:
    plane.publish(0, 1)
    old = await plane.fetch(0)
    await plane.fetch(1, old)
    plane.publish(2)
    fetched = await plane.fetch(2, old)
    assert [int(one.manifest.version) for one in fetched.deltas] == [1, 2]
    assert fetched.tensors == model(2)


async def test_a_chain_that_is_longer_than_the_full_payload_is_not_taken(plane: Plane) -> None:
    plane.publish(0)
    old = held = await plane.fetch(0)
    for version in range(1, 5):
        plane.publish(version, share=0.9, steps=200)
        held = await plane.fetch(version, held)
        assert held.deltas
    fetched = await plane.fetch(4, old)
    assert fetched.deltas == () and fetched.tensors == model(4, share=0.9, steps=200)


async def test_a_reader_more_than_an_anchor_behind_gets_the_full_payload(plane: Plane) -> None:
    plane.publish(0)
    behind = held = await plane.fetch(0)
    for version in range(1, ANCHOR_EVERY + 2):
        plane.publish(version)
        held = await plane.fetch(version, held)
        if version == 1:
            just_in_reach = held
    last = ANCHOR_EVERY + 1
    assert (await plane.fetch(last, behind)).deltas == ()
    assert len((await plane.fetch(last, just_in_reach)).deltas) == ANCHOR_EVERY


async def test_a_base_with_other_weights_gets_the_full_payload(plane: Plane) -> None:
    plane.publish(0, 1)
    other = WeightStore(keep=1)
    other.publish("r", 0, model(5))
    lying = Fetched(other.get("r", 0).manifest, model(5))
    fetched = await plane.fetch(1, lying)
    assert fetched.deltas == () and fetched.tensors == model(1)


async def test_a_base_that_is_not_what_it_says_is_noticed_and_the_full_payload_fetched(plane: Plane) -> None:
    """Invariant 3."""
    plane.publish(0, 1)
    base = await plane.fetch(0)
    damaged = Fetched(base.manifest, model(0) | {"embed": model(1)["embed"]})
    fetched = await plane.fetch(1, damaged)
    assert fetched.deltas == () and fetched.tensors == model(1)


async def test_equal_requests_get_equal_bytes_from_any_offset(plane: Plane) -> None:
    plane.publish(0, 1)
    base = await plane.fetch(0)
    manifest = await get_manifest(plane.channel, "r", 1, base)
    store = plane.store
    whole = b"".join(store.payload("r", 1, (0, bytes(base.manifest.digest))).parts)
    assert len(whole) == manifest.payload_bytes
    for offset in (0, 1, manifest.payload_bytes - 1, manifest.payload_bytes):
        request = pb.FetchRequest(run_id="r", version=1, offset=offset)
        request.base_version, request.base_digest = 0, base.manifest.digest
        method = plane.channel.unary_stream(fetch.FETCH_METHOD, pb.FetchRequest.SerializeToString)
        frames = [pb.FetchResponse.FromString(message) async for message in method(request)]
        assert b"".join(frame.chunk.data for frame in frames) == whole[offset:]
        assert frames[-1].end.payload_bytes == len(whole)


async def test_a_delta_that_is_no_longer_at_hand_is_made_again_with_the_same_bytes(plane: Plane) -> None:
    plane.publish(0, 1)
    base = (0, bytes(plane.store.get("r", 0).manifest.digest))
    first = plane.store.payload("r", 1, base)
    plane.store._deltas.forget(lambda key: True)
    again = plane.store.payload("r", 1, base)
    assert again is not first and again.digests() == first.digests() and again.size == first.size


async def test_a_relay_hands_on_what_it_fetched_under_the_same_manifest(plane: Plane) -> None:
    canary = pb.Canary(token_ids=[1, 2], logprobs=[-0.5])
    plane.store.publish("r", 0, model(0), adapter_config='{"r": 8}')
    plane.store.publish("r", 1, model(1), canary=canary, adapter_config='{"r": 8}')
    base = await plane.fetch(0)
    fetched = await plane.fetch(1, base)
    assert fetched.manifest.canary == canary and fetched.manifest.adapter_config == '{"r": 8}'
    relay = WeightStore(keep=1)
    relay.hold(base)
    relay.hold(fetched)
    assert relay.get("r", 1).manifest == plane.store.get("r", 1).manifest
    assert relay.get("r", 1).payload.digests() == plane.store.get("r", 1).payload.digests()
    # Its base is not held any more, but the delta that came is.
    at = (0, bytes(base.manifest.digest))
    assert relay.payload("r", 1, at).digests() == plane.store.payload("r", 1, at).digests()
    with pytest.raises(QuartetError, match="VERSION_UNKNOWN"):
        relay.payload("r", 1, (0, b"other"))


async def test_a_relay_hands_on_the_chain_by_which_it_caught_up(plane: Plane) -> None:
    """store.py 5, versions.py 2: who stands at a version that only passed through it goes on from there."""
    plane.publish(0)
    held = [await plane.fetch(0)]
    for version in range(1, 5):
        plane.publish(version)
        held.append(await plane.fetch(version, held[-1]))
    caught_up = await plane.fetch(4, held[0])
    assert len(caught_up.deltas) == 4
    relay = WeightStore(keep=2)
    relay.hold(held[0])
    relay.hold(caught_up)
    for base, came in zip(held[1:4], caught_up.deltas[1:], strict=True):
        road = relay.road("r", 4, (int(base.manifest.version), bytes(base.manifest.digest)))
        assert road.manifest == came.manifest and road.payload is came.payload


async def test_a_relay_goes_back_with_its_publisher() -> None:
    relay = WeightStore(keep=3)
    publisher = WeightStore(keep=9)

    def held(version: int, like: int) -> None:
        publisher.reopen_run("r")
        publisher.publish("r", version, model(like))
        relay.hold(Fetched(publisher.get("r", version).manifest, model(like)))

    for version in (1, 2, 3):
        held(version, version)
    told = relay.get("r")
    held(2, 2)
    newest = relay.get("r")
    assert newest.number == 2 and (await relay.wait_newer("r", 3, told)) is newest
    with pytest.raises(QuartetError, match="VERSION_UNKNOWN"):
        relay.get("r", 3)
    held(2, 1)
    assert dict(relay.get("r", 2).tensors) == model(1)


async def test_a_payload_that_nobody_fetches_is_never_hashed(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """payload.py 3: what is hashed was fetched whole, once for all readers, or is a delta."""
    hashed: list[int] = []
    digests = Payload._hashed

    def counting(payload: Payload) -> Digests:
        hashed.append(payload.size)
        return digests(payload)

    monkeypatch.setattr(Payload, "_hashed", counting)
    plane.publish(0, 1)
    relay = WeightStore(keep=2)
    assert not hashed
    base, _ = [await plane.fetch(0) for _ in range(2)]
    assert hashed == [base.received_bytes]
    fetched = await plane.fetch(1, base)
    relay.hold(base)
    relay.hold(fetched)
    assert hashed == [base.received_bytes, fetched.received_bytes] and hashed[1] < hashed[0] / 10
