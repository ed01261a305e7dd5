"""Several async iterators as one.

1. Items of one source keep their order. A source is at most MAX_AHEAD items ahead of who reads.
2. The first source that raises ends all of them with its exception.
3. However the merged iterator is left, every source is closed before it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

T = TypeVar("T")

# Items are deltas of 16 to 64 tokens; what is not read waits in gRPC's flow control.
MAX_AHEAD: Final = 16


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


async def merged(sources: Sequence[AsyncIterator[T]]) -> AsyncGenerator[T, None]:
    """The items of all sources, as they come."""
    if len(sources) == 1:
        only: Any = sources[0]
        async with aclosing(only) as items:
            async for item in items:
                yield item
        return
    queue: asyncio.Queue[T | _End] = asyncio.Queue(MAX_AHEAD)
    tasks = [asyncio.create_task(_pump(source, queue)) for source in sources]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
                continue
            running -= 1
            if item.error is not None:
                raise item.error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: Any, queue: asyncio.Queue[Any]) -> None:
    error: Exception | None = None
    async with aclosing(source) as items:
        try:
            async for item in items:
                await queue.put(item)
        except Exception as raised:  # noqa: BLE001 - carried to whoever reads
            error = raised
    await queue.put(_End(error))
