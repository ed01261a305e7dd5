"""Several answers as one stream of events, each with the number of its prompt.

1. At most EVENTS events wait for a slow reader.
2. The first failure ends all of them; so does leaving the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from quartet_inference.answering import Ended, Started
from quartet_inference.engine import Delta

#: An event has at most 64 tokens: a few hundred kilobytes in all.
EVENTS = 64

Event = tuple[int, Started | Delta | Ended]
Answer = AsyncIterator[Started | Delta | Ended]


async def merged(answers: Sequence[Answer]) -> AsyncIterator[Event]:
    """The events of all answers, as they come."""
    if len(answers) == 1:
        async with aclosing(answers[0]) as events:  # type: ignore[type-var]
            async for event in events:
                yield 0, event
        return
    waiting: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(EVENTS)

    async def read(number: int, answer: Answer) -> None:
        try:
            async with aclosing(answer) as events:  # type: ignore[type-var]
                async for event in events:
                    await waiting.put((number, event))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever reads the stream
            await waiting.put(error)
        else:
            await waiting.put(None)

    tasks = [asyncio.create_task(read(number, answer)) for number, answer in enumerate(answers)]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await waiting.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
