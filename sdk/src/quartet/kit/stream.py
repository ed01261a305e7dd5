"""Heartbeats on server streams, so that a silent peer is a dead one.

1. While the source has nothing to say, a heartbeat is sent every `interval_s`; its items pass unchanged and
   in order.
2. The source is never run ahead: the next item is asked for only when the one before was taken.
3. When the stream is left, by whatever way, the source is cancelled and closed: before the generator ends,
   unless that is cancelled in its turn.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, TypeVar

from quartet.errors import QuartetError

T = TypeVar("T")

HEARTBEAT_SECONDS: Final = 5.0
# A reader gives up after three missed heartbeats.
IDLE_TIMEOUT_SECONDS: Final = 3 * HEARTBEAT_SECONDS


async def with_heartbeats(
    source: AsyncIterator[T],
    make_heartbeat: Callable[[], T],
    interval_s: float = HEARTBEAT_SECONDS,
    *,
    until: asyncio.Event | None = None,
) -> AsyncIterator[T]:
    """The items of `source`, and a heartbeat whenever none came for `interval_s`.

    `until` (usually `health.draining`) ends a stream that has nothing to lose, such as a watch: NOT_READY.
    """
    loop = asyncio.get_running_loop()
    # One context for all steps of the source, so that what it sets in contextvars stays set for it.
    context = contextvars.copy_context()
    ended = None if until is None else loop.create_task(until.wait())
    pending: asyncio.Task[T] | None = None
    try:
        while True:
            pending = loop.create_task(_next(source), context=context)
            waited: set[asyncio.Task[Any]] = {pending} if ended is None else {pending, ended}
            while not pending.done():
                await asyncio.wait(waited, timeout=interval_s, return_when=asyncio.FIRST_COMPLETED)
                if not pending.done():
                    if ended is not None and ended.done():
                        raise QuartetError("NOT_READY", "the service is draining; call again elsewhere")
                    yield make_heartbeat()
            try:
                item = pending.result()
            except _Exhausted:
                return
            yield item
    finally:
        left: list[asyncio.Task[Any]] = [task for task in (pending, ended) if task is not None]
        # Shielded: who is cancelled once more while it leaves does not wait, but the source is closed.
        await asyncio.shield(loop.create_task(_close(source, left), context=context))


async def _close(source: AsyncIterator[T], left: Sequence[asyncio.Task[Any]]) -> None:
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    close = getattr(source, "aclose", None)
    if close is not None:
        await close()


class _Exhausted(Exception):
    """The source has ended: a task cannot carry StopAsyncIteration."""


async def _next(source: AsyncIterator[T]) -> T:
    try:
        return await anext(source)
    except StopAsyncIteration:
        raise _Exhausted from None
