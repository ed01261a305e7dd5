"""Replicas that relay versions to each other: who sends what, and what passes early."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.weights import arrival, fetch, sources
from quartet.weights.fetch import fetch_version
from quartet.weights.payload import CHUNK_BYTES
from quartet.weights.service import SERVICE, add_weight_service
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet_inference import relay
from quartet_inference.relay import Holdings, relay_address

from .relay_fleet import CHUNKS, Fleet, Trainer, size, tensors, until


def counts(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """The arguments of each call of a module's function."""
    called: list[Any] = []
    function = getattr(module, name)

    def noted(*arguments: Any) -> Any:
        called.append(arguments)
        return function(*arguments)

    monkeypatch.setattr(module, name, noted)
    return called


async def test_the_trainer_sends_a_version_once_however_many_replicas_follow(fleet: Fleet) -> None:
    await fleet.add(7)
    full = await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    assert fleet.trainer.streams == 1 and fleet.trainer.sent < 1.01 * size(full)
    digests = {replica.engine.served.digest for replica in fleet.replicas if replica.engine.served}
    assert digests == {full.digest}
    assert all(one.holdings.store.get("r", 0).manifest.digest == full.digest for one in fleet.replicas)


async def test_deltas_spread_the_same_way(fleet: Fleet) -> None:
    await fleet.add(5)
    await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    fleet.trainer.sent = 0
    full = await fleet.publish(1, tensors(1, changed=4000))
    await fleet.serve(1)
    assert fleet.trainer.sent < 0.01 * size(full), "one delta"
    held = fleet.replicas[4].holdings.store.get("r", 1)
    assert bytes(held.tensors["w"].data) == bytes(tensors(1, changed=4000)["w"].data)


async def test_a_replica_that_joins_late_fetches_from_the_others(fleet: Fleet) -> None:
    await fleet.add(2)
    await fleet.publish(3, tensors(1))
    await fleet.serve(3)
    sent = fleet.trainer.sent
    await fleet.add(2)
    await fleet.serve(3)
    assert fleet.trainer.sent == sent


async def test_relays_that_took_a_version_over_by_its_digest_hand_it_on(fleet: Fleet) -> None:
    """As what they hold, to whoever comes late, and as the base of what comes next."""
    await fleet.add(2)
    for version in (0, 1):
        await fleet.publish(version, tensors(1))
        await fleet.serve(version)
    sent = fleet.trainer.sent
    await fleet.add(1)
    await fleet.serve(1)
    assert fleet.trainer.sent == sent and not fleet.replicas[2].refused
    full = await fleet.publish(2, tensors(1, changed=4000))
    await fleet.serve(2)
    assert fleet.trainer.sent - sent < 0.01 * size(full), "a delta, though version 0 is gone there"


async def test_relays_that_had_the_weights_from_elsewhere_are_gone_round_at_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "START_SECONDS", 600.0)
    monkeypatch.setattr(sources, "SILENT_SECONDS", 600.0)
    await fleet.add(3)
    full = await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    # As engines that were started with other weights, and with those that come now.
    own = await asyncio.to_thread(WeightStore(keep=1).publish, "r", 1, tensors(2))
    for one in fleet.replicas:
        monkeypatch.setattr(one.engine, "base_digest", lambda: bytes(own.digest))
        one.engine.served = None
    await fleet.publish(1, tensors(2))
    await fleet.serve(1)
    sent = fleet.trainer.sent
    assert sent < 1.01 * size(full), "none of them fetched it"
    await fleet.add(1)
    await fleet.serve(1)
    assert fleet.trainer.sent - sent < 1.01 * size(full) and not fleet.replicas[3].refused


async def test_bytes_pass_through_before_a_relay_has_them_all(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = counts(monkeypatch, arrival, "sign_of_life")
    await fleet.add(3)
    fleet.trainer.gate.clear()
    fleet.trainer.gate_at = (CHUNKS - 3) * CHUNK_BYTES
    await fleet.publish(0, tensors(1))
    await until(lambda: fleet.came() >= (CHUNKS - 4) * CHUNK_BYTES)
    assert all(replica.version is None for replica in fleet.replicas)
    # Longer than a silent relay is waited for, by each of the two below it: signs of life keep the readers.
    signs = len(counted)
    enough = 2 * 1.2 * sources.SILENT_SECONDS / arrival.SIGN_SECONDS
    await until(lambda: len(counted) >= signs + enough)
    fleet.trainer.gate.set()
    await fleet.serve(0)
    assert fleet.trainer.streams == 1


async def test_invariant_3_what_was_not_verified_whole_is_never_complete(fleet: Fleet) -> None:
    """Every chunk is sound, but not one of the manifest's: no relay closes its stream or holds it."""
    await fleet.add(3)
    await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    fleet.trainer.lies = True
    await fleet.publish(1, tensors(2))
    await until(lambda: all(replica.refused for replica in fleet.replicas))
    for replica in fleet.replicas:
        latest = replica.holdings.store.latest("r")
        assert latest and latest.number == 0 and replica.version == 0
        why = replica.refused[0]
        assert "what its publisher declared" in why or "gave version 1 up" in why
    fleet.trainer.lies = False
    await fleet.serve(1)


async def test_promise_3_of_updates_what_the_engine_does_not_take_is_fetched_once(fleet: Fleet) -> None:
    await fleet.add(1)
    tries = 0

    async def refuse(tensors: Mapping[str, Tensor]) -> Any:
        nonlocal tries
        tries += 1
        raise QuartetError("OVERLOADED", "no room now")

    fleet.replicas[0].engine.stage = refuse  # type: ignore[method-assign]
    await fleet.publish(0, tensors(1))
    await until(lambda: tries > 3)
    assert fleet.trainer.streams == 1 and "no room now" in fleet.replicas[0].refused[-1]


async def test_a_restarted_trainer_is_followed_by_a_new_tree(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.add(5)
    fleet.trainer.gate.clear()
    fleet.trainer.gate_at = CHUNKS // 2 * CHUNK_BYTES
    await fleet.publish(0, tensors(1))
    await until(lambda: fleet.trainer.sent >= fleet.trainer.gate_at)
    address = fleet.server.address
    lost = counts(monkeypatch, fetch, "_backoff_seconds")
    await fleet.server.stop(0)
    await until(lambda: len(lost) >= 6)  # five watches, and the one fetch from the trainer
    again = Trainer(WeightStore(keep=2))
    full = await asyncio.to_thread(again.store.publish, "r", 0, tensors(1))
    server = await start(
        [Service(SERVICE, add_weight_service, again)], ServerConfig(address=address), Health()
    )
    try:
        await fleet.serve(0)
        assert again.sent < 1.2 * size(full), f"{again.streams} streams"
    finally:
        await server.stop(0)


async def test_the_same_bytes_come_from_a_relay_and_from_the_trainer(fleet: Fleet) -> None:
    """A fetch may begin at one and go on at the other."""
    await fleet.add(1)
    await fleet.publish(0, tensors(1))
    await fleet.publish(1, tensors(1, changed=999))
    await fleet.serve(1)
    fetched = []
    for address in (fleet.server.address, fleet.replicas[0].server.address):
        async with connect(address, bulk=True) as channel:
            fetched.append(await fetch_version(channel, "r", 1))
    assert fetched[0].manifest == fetched[1].manifest
    assert bytes(fetched[0].tensors["w"].data) == bytes(fetched[1].tensors["w"].data)


@pytest.fixture
def holdings() -> Holdings:
    return Holdings(2, 1 << 20)


def asked(holdings: Holdings, version: int) -> asyncio.Task[Any]:
    return asyncio.create_task(holdings.arrival("r", version, lambda manifest: manifest.version == version))


def arriving(version: int) -> arrival.Arrival:
    return arrival.Arrival(pb.WeightManifest(run_id="r", version=version), memoryview(b"bytes"))


async def test_a_fetch_from_a_relay_is_whole_although_the_relay_has_forgotten_its_run(fleet: Fleet) -> None:
    await fleet.add(1)
    full = await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    relaying = fleet.replicas[0]
    request = pb.FetchRequest(run_id="r", version=0)
    frames: Any = relaying.servicer.fetch_encoded(request, None)  # type: ignore[arg-type]
    come = len(await anext(frames))
    await asyncio.to_thread(fleet.trainer.store.publish, "next", 5, tensors(2))
    await fleet.serve(5)
    with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
        relaying.holdings.store.get("r", 0)
    async for frame in frames:
        come += len(frame)
    assert come > full.payload_bytes


async def test_promise_2_of_relay_who_asks_for_what_is_fetched_next_waits_for_its_manifest(
    holdings: Holdings,
) -> None:
    early = asked(holdings, 1)  # before this replica has heard of it
    await asyncio.sleep(0)
    holdings.expect("r", 1)
    later = asked(holdings, 1)
    holdings.fetching("r", 1)
    holdings.expect("r", 2)  # what is under way is finished all the same
    last = asked(holdings, 1)
    await asyncio.sleep(0)
    assert not any(task.done() for task in (early, later, last))
    coming = arriving(1)
    holdings.arriving(coming)
    assert await asyncio.gather(early, later, last) == [coming] * 3


async def test_promise_2_of_relay_who_has_waited_long_is_told_that_it_comes(
    holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "START_SECONDS", 0.02)
    for name in ("expect", "fetching"):
        getattr(holdings, name)("r", 1)
        with pytest.raises(QuartetError, match="about to be fetched") as waited:
            await asked(holdings, 1)
        assert waited.value.reason == "NOT_READY"
        holdings.expect("r", 2)
    with pytest.raises(QuartetError) as unheard:
        await asked(holdings, 3)
    assert unheard.value.reason == "VERSION_UNKNOWN"


async def test_promise_2_of_relay_who_asks_for_what_is_passed_over_is_told_at_once(
    holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "START_SECONDS", 600.0)
    holdings.expect("r", 1)
    waiting = asked(holdings, 1)
    await asyncio.sleep(0)
    holdings.expect("r", 2)
    for task in (waiting, asked(holdings, 1)):
        with pytest.raises(QuartetError) as passed:
            await asyncio.wait_for(task, 5)
        assert passed.value.reason == "VERSION_UNKNOWN" and passed.value.metadata["latest"] == "2"


async def test_promise_2_of_relay_who_asks_waits_once_for_what_comes_and_what_is_made_of_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader gives up after sources.SILENT_SECONDS: it may wait for the version, or for the delta."""
    monkeypatch.setattr(relay, "START_SECONDS", 3.0)
    await fleet.add(1)
    for version in (0, 1):
        await fleet.publish(version, tensors(1))
        await fleet.serve(version)
    relaying = fleet.replicas[0]
    arrives = relaying.holdings.arrival

    async def late(*asked: Any) -> None:
        await asyncio.sleep(2.0)
        assert await arrives(*asked) is None

    async def never(*_: object) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(relaying.holdings, "arrival", late)
    monkeypatch.setattr(relaying.servicer, "_in_thread", never)
    held = relaying.holdings.store.get("r", 0).manifest
    request = pb.GetManifestRequest(run_id="r", version=1, base_version=0, base_digest=held.digest)
    began = asyncio.get_running_loop().time()
    told = await relaying.servicer.GetManifest(request, None)  # type: ignore[arg-type]
    assert asyncio.get_running_loop().time() - began < 4.0
    assert told.manifest.version == 1 and not told.manifest.HasField("base_version"), "whole: it is there"


@pytest.mark.parametrize(
    ("advertised", "bound", "address"),
    [
        ("", "127.0.0.1:7", "127.0.0.1:7"),
        ("a.b:9", "0.0.0.0:7", "a.b:9"),
        ("", "unix:/tmp/x", "unix:/tmp/x"),
        ("", "10.1.2.3:7", "10.1.2.3:7"),
    ],
)
def test_addresses_that_others_can_dial(advertised: str, bound: str, address: str) -> None:
    assert relay_address(advertised, bound) == address


@pytest.mark.parametrize("bound", ["0.0.0.0:7", "[::]:7"])
def test_an_address_of_every_interface_becomes_the_name_of_the_host(bound: str) -> None:
    host, _, port = relay_address("", bound).rpartition(":")
    assert port == "7" and host not in ("0.0.0.0", "[::]", "")
