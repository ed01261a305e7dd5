"""Several answers as one stream: bounded, and ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet_inference.openai.merge import EVENTS, merged


class Answer:
    """Endless, or it fails after so many events."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.fails_after = fails_after
        self.told, self.closed = 0, False

    async def events(self) -> AsyncIterator[Any]:
        try:
            while self.told != self.fails_after:
                self.told += 1
                await asyncio.sleep(0)
                yield self.told
            raise QuartetError("OVERLOADED", "enough")
        finally:
            self.closed = True


async def test_a_slow_reader_holds_the_answers_up() -> None:
    """Invariant 8."""
    answers = [Answer() for _ in range(3)]
    stream = merged([one.events() for one in answers])
    async with aclosing(stream):  # type: ignore[type-var]
        told = [await anext(stream)]
        for _ in range(20 * EVENTS):  # in each turn of the loop every answer could tell one more
            await asyncio.sleep(0)
        assert sum(one.told for one in answers) <= EVENTS + 2 * len(answers)
        told += [await anext(stream) for _ in range(3 * EVENTS)]
    for number in range(3):
        of_one = [event for of, event in told if of == number]
        assert of_one == list(range(1, len(of_one) + 1))
    assert all(one.closed for one in answers), "leaving the stream ends them"


async def test_the_first_failure_ends_all() -> None:
    answers = [Answer(), Answer(fails_after=2), Answer()]
    with pytest.raises(QuartetError, match="enough"):
        async for _ in merged([one.events() for one in answers]):
            pass
    assert all(one.closed for one in answers)
