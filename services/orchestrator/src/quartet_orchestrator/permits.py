"""Permits: a bound on rollouts under way, taken by whole groups: those of an earlier batch first, and within
one first come first served.

1. A group takes all its permits at once, so two groups never wait for each other's.
2. A waiting large group is not overtaken by its equals. A group of an earlier batch goes first: a step waits
   for the last of its groups, and one that is sampled again must not wait behind the batches after it.
3. That is so here alone: what has its permits may wait elsewhere, in the order of asking. So a limit below
   the total follows what there is room for; a group that is larger than it goes alone.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools


class Permits:
    """So many permits, one for each rollout under way."""

    def __init__(self, total: int, limit: int | None = None) -> None:
        """`limit`: how many of them are given out until `limit_to` says otherwise."""
        assert total > 0
        self._total = total
        self._limit = total if limit is None else limit
        self._taken = 0
        # (batch, number of the call, permits, turn): no two are equal before the turn.
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._calls = itertools.count()

    async def take(self, count: int, batch: int = 0) -> None:
        """Waits for so many permits at once, behind those of earlier batches. Cancelled, it has none."""
        assert 0 < count <= self._total, f"{count} of {self._total}"
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (batch, next(self._calls), count, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(count)  # it was ours already
            else:
                self._admit()  # those behind it
            raise

    def give_back(self, count: int) -> None:
        """Frees so many; those that were taken at once may come back one by one."""
        self._taken -= count
        assert self._taken >= 0
        self._admit()

    def limit_to(self, limit: int) -> None:
        """So many are given out at once from now on; nobody loses what he has."""
        self._limit = limit
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            _, _, count, turn = self._waiting[0]
            if turn.cancelled():
                heapq.heappop(self._waiting)
            elif self._taken + count <= min(self._total, self._limit) or not self._taken:
                heapq.heappop(self._waiting)
                self._taken += count
                turn.set_result(None)
            else:
                return
