"""Several async iterators as one.

1. Items of one source keep their order. A source is at most MAX_AHEAD items ahead of who reads.
2. The first source that raises ends all of them with its exception.
3. However the merged iterator is left, every source is closed before it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

T = TypeVar("T")

# Items are deltas of 16 to 64 tokens; what is not read waits in gRPC's flow control.
MAX_AHEAD: Final = 16


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all sources, as they come."""
    if len(sources) == 1:  # nothing to merge: no task, no queue
        async with aclosing(sources[0]) as items:
            async for item in items:
                yield item
        return
    queue: asyncio.Queue[T | _End] = asyncio.Queue(MAX_AHEAD)
    tasks = [asyncio.create_task(_pump(source, queue)) for source in sources]
    running = len(tasks)
    try:
        while running:
            next_one = await queue.get()
            if not isinstance(next_one, _End):
                yield next_one
                continue
            running -= 1
            if next_one.error is not None:
                raise next_one.error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: AsyncGenerator[T, None], queue: asyncio.Queue[T | _End]) -> None:
    error: BaseException | None = None
    async with aclosing(source) as items:
        try:
            async for item in items:
                await queue.put(item)
        except asyncio.CancelledError as raised:
            task = asyncio.current_task()
            assert task is not None
            if task.cancelling():
                raise
            error = raised  # of a call whose channel was closed, as who reads one source is told
        except Exception as raised:  # noqa: BLE001 - carried to whoever reads
            error = raised
    await queue.put(_End(error))
