"""Several sources as one: in order, bounded, and ended together. Invariants of merge.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from quartet.errors import QuartetError
from quartet.replicas.merge import MAX_AHEAD, merged


class Source:
    """Endless, or it fails after so many items; an item is the source's number and its own."""

    def __init__(self, number: int = 0, fails_after: int | None = None) -> None:
        self.number, self.fails_after = number, fails_after
        self.told, self.closed = 0, False

    async def items(self) -> AsyncGenerator[tuple[int, int], None]:
        try:
            while self.told != self.fails_after:
                self.told += 1
                await asyncio.sleep(0)
                yield self.number, self.told
            raise QuartetError("OVERLOADED", "enough")
        finally:
            self.closed = True


@pytest.mark.parametrize("count", [1, 3])
async def test_a_slow_reader_holds_the_sources_up(count: int) -> None:
    """Invariants 1 and 3."""
    sources = [Source(number) for number in range(count)]
    async with aclosing(merged([one.items() for one in sources])) as stream:
        told = [await anext(stream)]
        for _ in range(20 * MAX_AHEAD):  # in each turn of the loop every source could tell one more
            await asyncio.sleep(0)
        assert sum(one.told for one in sources) <= MAX_AHEAD + 2 * count
        told += [await anext(stream) for _ in range(3 * MAX_AHEAD)]
    for number in range(count):
        of_one = [item for of, item in told if of == number]
        assert of_one and of_one == list(range(1, len(of_one) + 1))
    assert all(one.closed for one in sources), "leaving the stream ends them"


@pytest.mark.parametrize("count", [1, 3])
async def test_the_first_failure_ends_all(count: int) -> None:
    """Invariants 2 and 3."""
    sources = [Source(fails_after=2), Source(1), Source(2)][:count]
    with pytest.raises(QuartetError, match="enough"):
        async for _ in merged([one.items() for one in sources]):
            pass
    assert all(one.closed for one in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_a_source_whose_call_is_cancelled_ends_all(count: int) -> None:
    """Invariants 2 and 3: a channel that is closed cancels its calls, and not the tasks that read them."""

    async def cut() -> AsyncGenerator[tuple[int, int], None]:
        yield 0, 1
        raise asyncio.CancelledError

    others = [Source(number) for number in range(1, count)]
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(30):
            async for _ in merged([cut(), *(one.items() for one in others)]):
                pass
    assert all(one.closed for one in others)
