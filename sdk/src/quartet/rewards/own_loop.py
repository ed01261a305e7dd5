"""An event loop for the async functions of a script, in a thread of its own.

1. It is one loop as long as the process lasts: what a function keeps between two calls (a client of an API)
   belongs to the loop that it was made on.
2. Functions run side by side there. One that blocks delays the others, and nobody else.
3. Whatever one raises in a task of its own, the loop goes on (quartet.kit.own_tasks).
4. A process that one forked ends where it comes back (forked.py), or would wait: it has the loop's own pipes
   and sockets once more, and would take from the script what these are told.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from quartet.kit import own_tasks
from quartet.rewards import forked

T = TypeVar("T")


async def outcome(asked: Awaitable[T]) -> T:
    """What a function answers, or raises; a process that it forked ends with that (4). Whoever calls one here
    awaits it by this: what handles its errors would hide them."""
    process = os.getpid()
    try:
        answer = await asked
    except BaseException as error:
        forked.leave(process, error)
        raise
    forked.leave(process)
    return answer


class _Stays(own_tasks.OwnTask):
    """A coroutine whose steps end in the process in which they began, of any task of this loop."""

    def send(self, value: Any) -> Any:
        """One step of it."""
        return self._step(self._inner.send, value)

    def throw(self, *raised: Any) -> Any:
        """A step that begins by raising."""
        return self._step(self._inner.throw, *raised)

    def _step(self, step: Callable[..., Any], *values: Any) -> Any:
        process = os.getpid()
        try:
            waited_for = step(*values)
        except StopIteration:
            forked.leave(process)
            raise
        except BaseException as error:
            forked.leave(process, error)
            raise
        forked.leave(process, RuntimeError("it would wait"))
        return waited_for


def made(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
    """Of such a loop the factory of tasks (3, 4)."""
    return own_tasks.made(loop, _Stays(coroutine), **more)


class OwnLoop:
    """The loop; started by the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What it returns, or raises. Cancelled with its caller."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._running()))

    @property
    def is_inside(self) -> bool:
        """Whether whoever asks runs on the loop."""
        return self._thread is threading.current_thread()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_task_factory(made)
                run = self._loop.run_forever
                self._thread = threading.Thread(target=run, name="async reward functions", daemon=True)
                self._thread.start()
            return self._loop
