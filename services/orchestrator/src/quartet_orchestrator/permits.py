"""Permits: a bound on rollouts under way, taken by whole groups, first come first served.

A group takes all its permits at once, so two groups never wait for each other's. A waiting large group is not
overtaken.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Permits:
    def __init__(self, total: int) -> None:
        assert total > 0
        self._total = total
        self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> None:
        assert 0 < count <= self._total, f"{count} of {self._total}"
        if not self._waiting and count <= self._free:
            self._free -= count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(count)  # it was ours already
            else:
                if (count, turn) in self._waiting:  # else passed over by _admit
                    self._waiting.remove((count, turn))
                self._admit()
            raise

    def give_back(self, count: int) -> None:
        self._free += count
        assert self._free <= self._total
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            count, turn = self._waiting.popleft()
            if turn.cancelled():
                continue
            self._free -= count
            turn.set_result(None)
