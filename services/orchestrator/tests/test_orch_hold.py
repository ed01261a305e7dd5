"""Who holds the version published last, between its steps and after the end."""

from __future__ import annotations

import asyncio

import pytest
from quartet.errors import QuartetError
from quartet_orchestrator.hold import Hold


async def test_who_asks_between_two_steps_holds_at_once_and_the_next_one_waits_for_all():
    """hold.py 1"""
    hold = Hold()
    async with asyncio.timeout(60):
        await hold.move()  # the first step waits for nobody
    hold.moved()
    async with asyncio.timeout(60), hold.held(), hold.held():
        async with hold.held():
            moves = asyncio.create_task(hold.move())
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert not moves.done(), "two hold it still"
    async with asyncio.timeout(60):
        await moves
        hold.moved()
        await hold.move()  # nobody holds, nobody is waited for


async def test_who_fails_while_it_holds_lets_go():
    """hold.py 1: else the run would stand still for good."""
    hold = Hold()
    hold.moved()
    with pytest.raises(QuartetError, match="unread"):
        async with hold.held():
            raise QuartetError("OVERLOADED", "unread")
    async with asyncio.timeout(60):
        await hold.move()


async def test_each_is_told_of_the_end_by_an_error_of_its_own():
    """hold.py 2: a traceback grows with each that raises the same one."""
    hold, why = Hold(), QuartetError("RUN_NOT_SERVED", "over")
    waits = asyncio.create_task(hold.ended())
    await asyncio.sleep(0.01)
    assert not waits.done()
    hold.end(why)
    with pytest.raises(QuartetError, match="over") as first:
        await waits
    for _ in range(2):
        with pytest.raises(QuartetError, match="over") as told:
            async with hold.held():
                raise AssertionError("it came to hold a version")
        assert told.value is not why and first.value is not why
