"""Streams: given up when silent, left early, kept alive by heartbeats (quartet.kit.call, .stream)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from guinea_pig import drained, failure, served
from quartet.errors import QuartetError
from quartet.kit.call import stream
from quartet.kit.stream import with_heartbeats
from quartet.v1 import weights_pb2 as pb


async def _items(*delays: float) -> AsyncIterator[str]:
    for index, delay in enumerate(delays):
        await asyncio.sleep(delay)
        yield str(index)


async def test_a_silent_stream_is_given_up_and_its_handler_ends() -> None:
    """Invariant 7, call.py 3."""
    async with served() as (pig, stub, _running):
        while pig.in_memory is None:  # a busy machine may need all of the time for the way there
            error = await failure(drained(stream(stub.Watch(pb.WatchRequest()), idle_timeout_s=0.2)))
            assert error.reason == "DEADLINE"
        async with asyncio.timeout(30):
            await pig.left.wait()


async def test_what_came_while_the_loop_did_not_run_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """call.py 3: a policy that computes on the loop, a cell of a notebook. Timers come before sockets."""
    loop, monotonic = asyncio.get_running_loop(), time.monotonic

    class Call:
        left = False

        async def read(self) -> str:
            def wake() -> None:
                monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 60)
                loop.call_later(0.05, heard.set_result, "0")

            heard = loop.create_future()
            loop.call_soon(wake)
            return await heard

        def cancel(self) -> None:
            self.left = True

    call = Call()
    async with contextlib.aclosing(stream(call, idle_timeout_s=15)) as responses:
        assert await anext(responses) == "0" and not call.left


async def test_a_stream_left_early_ends_its_handler() -> None:
    """call.py 3."""
    async with served() as (pig, stub, _running):
        async with contextlib.aclosing(stream(stub.Watch(pb.WatchRequest()), idle_timeout_s=20)) as responses:
            assert (await anext(responses)).announced.version == 1
        async with asyncio.timeout(30):
            await pig.left.wait()


async def test_a_stream_whose_server_dies_is_not_ready() -> None:
    """call.py 1."""
    async with served() as (_pig, stub, running):
        responses = stream(stub.Watch(pb.WatchRequest()), idle_timeout_s=20)
        await anext(responses)
        await running.stop(0)
        assert (await failure(anext(responses))).reason == "NOT_READY"


async def test_heartbeats_fill_only_the_silence() -> None:
    """Invariant 7 and stream.py 1: every stream has a heartbeat."""
    heard = asyncio.Event()

    async def items() -> AsyncIterator[str]:
        yield "0"
        await heard.wait()
        yield "1"
        yield "2"

    got = list[str]()
    async for item in with_heartbeats(items(), lambda: "beat", 0.05):
        got.append(item)
        if got.count("beat") == 2:
            heard.set()
    assert got == ["0", "beat", "beat", "1", "2"]


async def test_heartbeats_pass_errors_on() -> None:
    async def fails() -> AsyncIterator[str]:
        yield "0"
        raise QuartetError("NOT_READY", "gone")

    got = with_heartbeats(fails(), lambda: "beat", 1)
    assert await anext(got) == "0"
    assert (await failure(anext(got))).reason == "NOT_READY"


async def test_the_source_is_never_run_ahead() -> None:
    """stream.py 2: what a slow reader has not taken is not made, or a queue in memory would grow."""
    made = 0

    async def endless() -> AsyncIterator[int]:
        nonlocal made
        while True:
            made += 1
            yield made

    async with contextlib.aclosing(with_heartbeats(endless(), lambda: -1, 0.01)) as got:
        for number in range(1, 4):
            assert await anext(got) == number
            await asyncio.sleep(0.03)  # time for a source that nobody holds up, and for heartbeats
            assert made == number


async def test_leaving_heartbeats_closes_the_source() -> None:
    """stream.py 3."""
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[str]:
        try:
            await asyncio.Event().wait()
            yield ""
        finally:
            closed.set()

    async with contextlib.aclosing(with_heartbeats(endless(), lambda: "beat", 0.01)) as got:
        assert await anext(got) == "beat"
    assert closed.is_set()


async def test_leaving_between_two_items_closes_the_source() -> None:
    """stream.py 3: nobody waits for it then, and there is nothing to cancel."""
    closed = asyncio.Event()

    async def items() -> AsyncIterator[str]:
        try:
            while True:
                yield "0"
        finally:
            closed.set()

    source = items()
    async with contextlib.aclosing(with_heartbeats(source, lambda: "beat", 60)) as got:
        assert await anext(got) == "0"
    assert closed.is_set()


async def test_heartbeats_end_when_told() -> None:
    told = asyncio.Event()
    got = with_heartbeats(_items(0, 60), lambda: "beat", 0.01, until=told)
    assert [await anext(got), await anext(got)] == ["0", "beat"]
    told.set()
    assert (await failure(anext(got))).reason == "NOT_READY"


async def test_neither_items_nor_the_end_wait_for_a_heartbeat() -> None:
    told = asyncio.Event()
    got = with_heartbeats(_items(0, 0.01, 60), lambda: "beat", 60, until=told)
    async with asyncio.timeout(30):
        assert [await anext(got), await anext(got)] == ["0", "1"]
        last = asyncio.ensure_future(failure(anext(got)))
        await asyncio.sleep(0.01)
        told.set()
        assert (await last).reason == "NOT_READY"


async def test_a_source_is_closed_also_where_its_reader_is_cancelled_twice() -> None:
    """stream.py 3."""
    closed = asyncio.Event()

    async def source() -> AsyncIterator[str]:
        try:
            yield "0"
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.05)  # such as telling a peer
            closed.set()

    async def read() -> None:
        async for _ in with_heartbeats(source(), lambda: "beat", 60):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await asyncio.wait_for(closed.wait(), 30)
