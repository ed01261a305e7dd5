"""An event loop for the async functions of a script, in a thread of its own.

1. It is one loop as long as the process lasts: what a function keeps between two calls (a client of an API)
   belongs to the loop that it was made on.
2. Functions run side by side there. One that blocks delays the others, and nobody else.
3. Whatever one raises in a task of its own, the loop goes on (quartet.kit.own_tasks).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from quartet.kit import own_tasks

T = TypeVar("T")


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
                self._loop.set_task_factory(own_tasks.made)
                run = self._loop.run_forever
                self._thread = threading.Thread(target=run, name="async reward functions", daemon=True)
                self._thread.start()
            return self._loop
