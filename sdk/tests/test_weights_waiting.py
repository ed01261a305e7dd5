"""quartet.weights.waiting: what comes wakes whoever waits, whatever became of the others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from quartet.weights.waiting import Waiters


async def test_what_comes_from_other_threads_is_found_by_all_who_wait() -> None:
    """waiting.py 1, 2."""
    waiters, came = Waiters(), list[int]()

    def bring() -> None:
        for number in range(1, 101):
            came.append(number)
            waiters.wake()

    async def find(number: int) -> int:
        return await waiters.until(lambda: came[number - 1] if len(came) >= number else None)

    waiting = [asyncio.create_task(find(number)) for number in (1, 50, 100)]
    await asyncio.sleep(0)
    assert len(waiters) == 3
    thread = threading.Thread(target=bring)
    thread.start()
    async with asyncio.timeout(30):
        assert await asyncio.gather(*waiting) == [1, 50, 100]
    thread.join()
    assert not len(waiters)


async def test_what_cannot_be_found_ends_the_waiting() -> None:
    waiters, gone = Waiters(), list[str]()

    def found() -> None:
        if gone:
            raise ValueError(gone[0])

    waiting = asyncio.create_task(waiters.until(found))
    await asyncio.sleep(0)
    gone.append("the run is closed")
    waiters.wake()
    with pytest.raises(ValueError, match="the run is closed"):
        await waiting
    assert not len(waiters)


async def test_a_loop_that_closes_as_something_comes_is_nothing_to_those_of_other_loops() -> None:
    """It is closed behind the back of whoever has just looked."""

    class Closing(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *call: Any, **named: Any) -> Any:
            if left.is_set():
                self.close()
            return super().call_soon_threadsafe(*call, **named)

    waiters, came, left = Waiters(), list[int](), threading.Event()
    found = lambda: came[0] if came else None  # noqa: E731
    here = [asyncio.create_task(waiters.until(found)) for _ in range(4)]
    await asyncio.sleep(0)
    there = Closing()
    abandoned: Any = there.create_task(waiters.until(found))
    abandoned._log_destroy_pending = False
    await asyncio.to_thread(lambda: there.run_until_complete(asyncio.sleep(0)))
    assert len(waiters) == 5
    left.set()
    came.append(7)
    waiters.wake()
    async with asyncio.timeout(30):
        assert await asyncio.gather(*here) == [7] * 4
    assert not abandoned.done()
