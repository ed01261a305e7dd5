"""Watch over real gRPC on loopback: what is told, again after restarts, and signs of life."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial

import grpc
import pytest
import structlog
from loopback import LOOPBACK
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.weights import fetch, service
from quartet.weights.fetch import watch
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.store import WeightStore
from weight_plane import Plane, model, stub


async def test_an_idle_watch_shows_signs_of_life(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.store.publish("r", 4, model())
    monkeypatch.setattr(service, "with_heartbeats", partial(service.with_heartbeats, interval_s=0.02))
    watching = stub(plane.channel).Watch(pb.WatchRequest(run_id="r", held_version=4))
    beat = await asyncio.wait_for(watching.read(), 30)
    assert beat == pb.WatchResponse(heartbeat=pb.WatchHeartbeat(latest_version=4))
    watching.cancel()


async def test_watch_tells_the_newest_and_only_newer_ones(plane: Plane) -> None:
    for version in (1, 2):
        plane.store.publish("r", version, model(version))
    async with aclosing(watch(plane.channel, "r", 0)) as news:
        first = await asyncio.wait_for(anext(news), 30)
        assert (first.version, first.digest) == (2, plane.store.get("r", 2).manifest.digest)
        plane.store.publish("r", 1, model(1))
        plane.store.publish("r", 3, model(3))
        assert (await asyncio.wait_for(anext(news), 30)).version == 3
        plane.store.publish("r", 4, model(4))
        assert (await asyncio.wait_for(anext(news), 30)).version == 4, "nothing came between"


async def test_watch_waits_for_a_run_that_is_not_there_yet(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = asyncio.Event()

    def pause_s(failures: int) -> float:
        refused.set()
        return 0.01

    monkeypatch.setattr(fetch, "_backoff_seconds", pause_s)
    async with aclosing(watch(plane.channel, "r", None)) as news:
        waiting = asyncio.ensure_future(anext(news))
        await asyncio.wait_for(refused.wait(), 30)
        plane.store.publish("r", 0, model())
        assert (await asyncio.wait_for(waiting, 30)).version == 0


async def test_a_run_that_stays_away_is_logged_ever_more_rarely(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenth, failed = asyncio.Event(), 0

    def pause_s(failures: int) -> float:
        nonlocal failed
        failed += 1
        if failed == 10:
            tenth.set()
        return 0.001

    monkeypatch.setattr(fetch, "_backoff_seconds", pause_s)
    with structlog.testing.capture_logs() as logs:
        async with aclosing(watch(plane.channel, "gone", None)) as news:
            waiting = asyncio.ensure_future(anext(news))
            await asyncio.wait_for(tenth.wait(), 30)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    told = [line["failures"] for line in logs if line["event"] == "watch lost"]
    assert told[:5] == [0, 1, 2, 4, 8] and len(told) <= 6


async def test_watch_of_no_name_follows_the_run_opened_last(plane: Plane) -> None:
    async with aclosing(watch(plane.channel, "", None)) as news:
        for run_id, version in (("a", 7), ("b", 0), ("b", 1)):
            plane.store.publish(run_id, version, model(version))
            told = await asyncio.wait_for(anext(news), 30)
            assert (told.run_id, told.version) == (run_id, version)


async def test_whoever_watches_is_a_source_for_as_long_as_its_watch_is_open(plane: Plane) -> None:
    """tree.py 4"""
    plane.store.publish("r", 1, model())

    async def told(relay_address: str) -> tuple[list[str], grpc.aio.Call]:
        watching = stub(plane.channel).Watch(pb.WatchRequest(run_id="r", relay_address=relay_address))
        return list((await asyncio.wait_for(watching.read(), 30)).announced.sources), watching

    sources, first = await told("10.0.0.1:1")
    assert sources == []
    sources, second = await told("10.0.0.2:1")
    assert sources == ["10.0.0.1:1"]
    first.cancel()
    async with asyncio.timeout(30):
        while sources != ["10.0.0.2:1"]:
            sources, asking = await told("")
            asking.cancel()
    second.cancel()


async def publisher(address: str, version: int, store: WeightStore) -> RunningServer:
    store.publish("r", version, model(version))
    offered = Service(SERVICE, add_weight_service, WeightServicer(store))
    return await start([offered], ServerConfig(address=address), Health())


@pytest.mark.parametrize("run_id", ["r", ""])
async def test_watch_survives_restarts_and_tells_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    monkeypatch.setattr(fetch, "BACKOFF_SECONDS", (0.01, 0.05))
    server = await publisher(f"{LOOPBACK}:0", 1, WeightStore(keep=1))
    channel = connect(server.address, bulk=True)
    async with aclosing(watch(channel, run_id, None)) as news:
        assert (await asyncio.wait_for(anext(news), 30)).version == 1
        waiting = asyncio.ensure_future(anext(news))
        await server.stop(0)
        store = WeightStore(keep=1)
        server = await publisher(server.address, 1, store)
        async with asyncio.timeout(30):
            while not store._waiters:  # noqa: ASYNC110 - the watch has come back, and was told what it knows
                await asyncio.sleep(0.01)
        store.publish("r", 2, model(2))
        assert (await asyncio.wait_for(waiting, 30)).version == 2, "and nothing twice before it"
        for version in (3, 0):
            waiting = asyncio.ensure_future(anext(news))
            await server.stop(0)
            server = await publisher(server.address, version, WeightStore(keep=1))
            assert (await asyncio.wait_for(waiting, 30)).version == version
    await channel.close()
    await server.stop(0)
