"""Waiting for what another thread may bring: the trainer publishes from its worker while event loops wait.

1. What was there when somebody began to wait, or came since, is found: no news falls in between.
2. Safe from any thread; whoever waits does so in its own event loop, without a timer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiter:
    loop: asyncio.AbstractEventLoop
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        # One that was closed has nobody left to wake; asked before whether it was, it could close since then.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.woken.set)


class Waiters:
    """Those who wait."""

    def __init__(self) -> None:
        """Nobody does."""
        self._lock = threading.Lock()
        self._waiters: set[_Waiter] = set()

    def __len__(self) -> int:
        return len(self._waiters)

    def wake(self) -> None:
        """Something came: all look again."""
        with self._lock:
            for waiter in self._waiters:
                waiter.wake()

    async def until(self, found: Callable[[], T | None]) -> T:
        """What is found, at once or after some `wake`; what `found` raises ends the waiting."""
        waiter = _Waiter(asyncio.get_running_loop())
        with self._lock:
            self._waiters.add(waiter)
        try:
            while True:
                waiter.woken.clear()
                if (result := found()) is not None:
                    return result
                await waiter.woken.wait()
        finally:
            with self._lock:
                self._waiters.discard(waiter)
