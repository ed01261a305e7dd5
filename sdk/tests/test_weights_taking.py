"""Readers that stop reading, and stay: what is held for them."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.kit.call import stream
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.weights import taking
from quartet.weights.fetch import fetch_version
from quartet.weights.payload import CHUNK_BYTES, Payload
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.store import WeightStore
from quartet.weights.taking import while_taken
from quartet.weights.tensor import Tensor
from weight_plane import stub

#: More than gRPC takes from a publisher whose reader reads nothing.
CHUNKS = 64


def tensors() -> dict[str, Tensor]:
    return {"w": Tensor("U8", (CHUNKS * CHUNK_BYTES,), os.urandom(CHUNKS * CHUNK_BYTES))}


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def hashed(store: WeightStore) -> weakref.ref[Payload]:
    """What a Fetch of version 1 sends: chunks from the first message on, however slow the machine."""
    payload = store.get("r", 1).payload
    await asyncio.to_thread(payload.digests)
    return weakref.ref(payload)


@pytest.fixture
async def plane() -> AsyncIterator[tuple[WeightStore, Any]]:
    store = WeightStore(keep=1)
    service = Service(SERVICE, add_weight_service, WeightServicer(store))
    server = await start([service], ServerConfig(), Health())
    async with connect(server.address, bulk=True) as channel:
        yield store, channel
    await server.stop(0)


async def test_promises_1_and_2_who_stops_reading_keeps_no_version_and_is_told_when_he_reads_on(
    plane: tuple[WeightStore, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariants 7 and 8 of the design."""
    store, channel = plane
    monkeypatch.setattr(taking, "TAKEN_SECONDS", 0.3)
    await asyncio.to_thread(store.publish, "r", 1, tensors())
    payload = await hashed(store)
    call = stub(channel).Fetch(pb.FetchRequest(run_id="r", version=1))
    first = await call.read()
    await asyncio.to_thread(store.publish, "r", 2, tensors())
    await until(lambda: payload() is None)
    taken = [first]
    with pytest.raises(QuartetError) as told:
        async for response in stream(call, idle_timeout_s=30):
            taken.append(response)
    assert told.value.reason == "DEADLINE" and "took nothing for 0.3 s" in told.value.message
    assert [one.chunk.offset for one in taken] == [number * CHUNK_BYTES for number in range(len(taken))]
    assert len(taken) < CHUNKS
    # Who comes back is served as before.
    assert (await fetch_version(channel, "r", 2)).tensors == store.get("r", 2).tensors


async def test_promise_1_a_reader_that_reads_what_is_evicted_has_it_to_the_end(
    plane: tuple[WeightStore, Any],
) -> None:
    store, channel = plane
    await asyncio.to_thread(store.publish, "r", 1, tensors())
    payload = await hashed(store)
    call = stub(channel).Fetch(pb.FetchRequest(run_id="r", version=1))
    await call.read()
    await asyncio.to_thread(store.publish, "r", 2, tensors())
    assert payload() is not None
    rest = [response async for response in stream(call, idle_timeout_s=30)]
    assert len(rest) == CHUNKS + 1 and rest[-1].end.payload_bytes > CHUNKS * CHUNK_BYTES
    await until(lambda: payload() is None)


async def test_promise_3_each_message_that_is_taken_begins_the_time_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Patience:
        """What a timer of the loop is, fired by hand."""

        def __init__(self, delay_s: float, fire: Callable[[], None]) -> None:
            self.delay_s, self.fire, self.cancelled = delay_s, fire, False

        def cancel(self) -> None:
            self.cancelled = True

    begun: list[Patience] = []

    def call_later(delay_s: float, fire: Callable[[], None]) -> Patience:
        begun.append(Patience(delay_s, fire))
        return begun[-1]

    closed = 0

    async def messages(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        nonlocal closed
        try:
            for number in range(5):
                yield bytes([number])
        finally:
            closed += 1

    sent = while_taken(messages)(None, None)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "call_later", call_later)
        for number in range(3):
            assert await anext(sent) == bytes([number])
            assert [one.cancelled for one in begun] == [True] * number + [False]
        assert {one.delay_s for one in begun} == {taking.TAKEN_SECONDS} and not closed
        begun[-1].fire()
        with pytest.raises(QuartetError, match="took nothing"):
            await anext(sent)
    assert closed == 1


async def test_a_reader_that_leaves_closes_what_it_reads() -> None:
    closed = asyncio.Event()

    async def messages(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            yield b"one"
            yield b"two"
        finally:
            closed.set()

    sent = while_taken(messages)(None, None)
    assert await anext(sent) == b"one"
    await sent.aclose()
    assert closed.is_set()
