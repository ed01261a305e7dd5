"""Pushes that end early, late or not at all: bounded in time, number and bytes, and gone on with."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import unittest.mock
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import xxhash
from push_taker import Taker, frames, model, offer, serve, take, until_under_way
from quartet.errors import QuartetError, from_rpc
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.weights import push
from quartet.weights.delta import make_delta
from quartet.weights.fetched import Fetched
from quartet.weights.frames import PUSH_CHUNK, PUSH_METHOD, encode_chunk
from quartet.weights.manifest import build_manifest
from quartet.weights.payload import full_payload
from quartet.weights.push import push_version
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.store import WeightStore
from severed import way_to


async def _push_and_hang(address: str) -> None:
    async def messages() -> AsyncIterator[bytes]:
        for request in frames()[:-1]:
            yield request.SerializeToString()
        print("sent", flush=True)
        await asyncio.sleep(60)

    async with connect(address, bulk=True) as channel:
        await channel.stream_unary(PUSH_METHOD)(messages())


async def test_a_killed_client_commits_nothing(taker: Taker) -> None:
    """Invariant 9: to the server its stream ends like any other."""
    command = [sys.executable, __file__, taker.address]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"sent\n"
    await until_under_way(taker.servicer, 1)
    process.kill()
    await process.wait()
    await until_under_way(taker.servicer, 0)
    assert taker.versions() == []


async def test_a_silent_client_is_given_up(taker: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7."""
    # Long enough for both frames: grpc.aio may lose the reason where it comes in the midst of a write.
    monkeypatch.setattr(push, "IDLE_SECONDS", 1.0)
    method = taker.channel.stream_unary(PUSH_METHOD)

    async def messages() -> AsyncIterator[bytes]:
        for request in frames()[:2]:
            yield request.SerializeToString()
        await asyncio.sleep(30)

    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.wait_for(method(messages()), 30)
    assert from_rpc(caught.value).reason == "DEADLINE" and taker.versions() == []


async def test_an_upload_that_trickles_is_given_up(taker: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariants 7 and 8: a frame now and then is no progress worth a place."""
    monkeypatch.setattr(push, "PUSH_SECONDS", 0.3)
    monkeypatch.setattr(push, "MAX_PUSHES", 1)
    method = taker.channel.stream_unary(PUSH_METHOD)
    payload = full_payload(model())

    async def messages() -> AsyncIterator[bytes]:
        yield frames()[0].SerializeToString()
        for at in range(1000):
            byte = b"".join(payload.slices(at, at + 1))
            checksum = xxhash.xxh3_64_intdigest(byte)
            yield encode_chunk(at, [byte], 1, checksum, PUSH_CHUNK)
            await asyncio.sleep(0.05)

    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.wait_for(method(messages()), 20)
    # grpc.aio may lose the reason where it comes in the midst of a write (grpc/grpc#36066).
    assert from_rpc(caught.value).reason in ("DEADLINE", "INTERNAL") and taker.versions() == []
    # More bytes justify more time.
    monkeypatch.setattr(push, "PUSH_SECONDS", 0.0)
    monkeypatch.setattr(push, "BYTES_PER_SECOND", payload.size / 20)
    await push_version(taker.channel, "r", 1, model())
    assert taker.versions() == [1], "its place was given back"


@pytest.mark.parametrize("megabytes", [1, 180, 3_000, 64_000])
def test_a_narrow_way_is_no_trickle(megabytes: int) -> None:
    """Of 16 Mbit/s, whatever is sent by it."""
    assert push._upload_seconds(megabytes * 10**6) > megabytes / 2


async def test_an_upload_whose_time_is_over_says_how_much_it_was_and_had(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own deadline ends it where the way is cut: gRPC says "Deadline Exceeded", and no more."""
    monkeypatch.setattr(push, "PUSH_SECONDS", 1.0)
    monkeypatch.setattr(push, "MAX_TRIES", 1)
    size = full_payload(model()).size
    async with way_to(taker.address) as way, connect(way.address, bulk=True) as channel:
        way.cut()
        with pytest.raises(QuartetError, match=f"DEADLINE: the upload of {size} bytes took longer than 3 s"):
            await push_version(channel, "r", 1, model())
    assert taker.versions() == []


async def test_staging_is_bounded_and_given_back(taker: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 8."""
    size = build_manifest("r", 1, model()).payload_bytes
    monkeypatch.setattr(push, "MAX_STAGED_BYTES", size - 1)
    monkeypatch.setattr(push, "MAX_TRIES", 1)
    with pytest.raises(QuartetError, match="OVERLOADED"):
        await push_version(taker.channel, "r", 1, model())
    monkeypatch.setattr(push, "MAX_STAGED_BYTES", size)
    for _ in range(3):
        sent = frames()[:-1]
        with pytest.raises(QuartetError, match="STREAM_TORN"):
            await taker.send(iter(sent))
    await push_version(taker.channel, "r", 1, model())


async def test_a_delta_is_staged_with_what_it_leads_to(taker: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 8."""
    first = await push_version(taker.channel, "r", 1, model())
    changed = model() | {"norm": model(1)["norm"]}
    second = Fetched(build_manifest("r", 2, changed), changed)
    both = make_delta(first, second).payload.size + second.manifest.payload_bytes
    monkeypatch.setattr(push, "MAX_STAGED_BYTES", both - 1)
    monkeypatch.setattr(push, "MAX_TRIES", 1)
    with pytest.raises(QuartetError, match="OVERLOADED"):
        await push_version(taker.channel, "r", 2, changed, base=first)
    monkeypatch.setattr(push, "MAX_STAGED_BYTES", both)
    await push_version(taker.channel, "r", 2, changed, base=first)


async def test_uploads_at_once_are_bounded(taker: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 8."""
    monkeypatch.setattr(push, "MAX_PUSHES", 1)
    monkeypatch.setattr(push, "MAX_TRIES", 1)
    method = taker.channel.stream_unary(PUSH_METHOD)
    begun, rest = asyncio.Event(), asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        for index, request in enumerate(frames()):
            if index == 3:
                begun.set()
                await rest.wait()
            yield request.SerializeToString()

    first = asyncio.ensure_future(method(messages(), timeout=20))
    await asyncio.wait_for(begun.wait(), 30)
    await until_under_way(taker.servicer, 1)
    with pytest.raises(QuartetError, match="OVERLOADED"):
        await push_version(taker.channel, "r", 2, model(2))
    rest.set()
    await first
    await push_version(taker.channel, "r", 2, model(2))
    assert taker.versions() == [1, 2]


@pytest.mark.parametrize(
    "reason", ["NOT_READY", "OVERLOADED", "DEADLINE", "STREAM_TORN", "CHECKSUM_MISMATCH"]
)
async def test_what_may_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(push, "RETRY_SECONDS", 0.01)
    passing = [QuartetError(reason, "not now", retry_after_ms=1)]

    def fits(manifest: pb.WeightManifest) -> None:
        if passing:
            raise passing.pop()

    store = WeightStore(keep=1)
    server = await offer(WeightServicer(store, accept_push=fits))
    async with connect(server.address, bulk=True) as channel:
        await push_version(channel, "r", 1, model())
    assert not passing and store.get("r", 1).tensors == model()
    await server.stop(0)


@pytest.mark.parametrize("leaves", [True, False])
async def test_the_newest_stays_however_long_a_commit_takes(leaves: bool) -> None:
    """push.py 4 and 7: one whose client leaves goes on, and one that repeats the newest is a commit, too."""
    store, began, go_on = WeightStore(keep=1), threading.Event(), threading.Event()
    pushes, plain = push.Pushes(store, take), store.commit

    async def pushed(version: int) -> pb.PushResponse:
        async def messages() -> AsyncIterator[bytes]:
            for frame in frames(version, version):
                yield frame.SerializeToString()

        async def at_once() -> None:
            pass

        return await pushes.receive(messages(), at_once)

    def slow(made: Fetched) -> Any:
        began.set()
        assert go_on.wait(20)
        return plain(made)

    if not leaves:
        await pushed(5)
    with unittest.mock.patch.object(store, "commit", slow):
        first = asyncio.create_task(pushed(6 if leaves else 5))
        assert await asyncio.to_thread(began.wait, 20)
    if leaves:
        first.cancel()
        await asyncio.wait([first])
    second = asyncio.create_task(pushed(5 if leaves else 6))
    async with asyncio.timeout(20):
        while not second.done() and not pushes._committing._waiters:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    go_on.set()
    ended = await asyncio.gather(first, second, return_exceptions=True)
    latest = store.latest("r")
    assert latest is not None and latest.number == 6
    assert ("SEQUENCE_CONFLICT" in str(ended[1])) == leaves


async def test_a_push_goes_on_when_the_server_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torn = asyncio.Event()
    push_once = push._push_once

    async def tearing(*arguments: Any) -> None:
        try:
            await push_once(*arguments)
        except QuartetError:
            torn.set()
            raise

    monkeypatch.setattr(push, "RETRY_SECONDS", 0.3)
    monkeypatch.setattr(push, "_push_once", tearing)
    store = WeightStore(keep=1)
    gone = await serve(store)
    address = gone.address
    await gone.stop(0)
    async with connect(address, bulk=True) as channel:
        pushing = asyncio.create_task(push_version(channel, "r", 1, model()))
        await asyncio.wait_for(torn.wait(), 30)
        servicer = WeightServicer(store, accept_push=take)
        offered = Service(SERVICE, add_weight_service, servicer)
        server = await start([offered], ServerConfig(address=address), Health())
        await asyncio.wait_for(pushing, 20)
    assert store.get("r", 1).tensors == model()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(_push_and_hang(sys.argv[1]))
