"""Turns: runs that train the whole model go one after the other, because a replica of inference serves the
weights of one of them. Runs that publish adapters share what is served, and take no turn.

1. At most `places` runs have a turn at once; the others wait in the order in which they asked.
2. Whoever waits is told once for whom.
3. A turn ends by `leave`, whoever had it, waits for it, or neither.

Pure but for the waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Turns:
    def __init__(self, places: int) -> None:
        assert places > 0
        self._places = places
        # In the order of asking; the first `places` of them have their turn.
        self._line: dict[str, asyncio.Event] = {}

    async def take(self, run_id: str, waits_for: Callable[[list[str]], None]) -> None:
        """Returns once it is the run's turn."""
        assert run_id not in self._line
        turn = self._line[run_id] = asyncio.Event()
        before = [name for name in self._line if name != run_id]
        if len(before) >= self._places:
            waits_for(before)
        self._call_next()
        await turn.wait()

    def leave(self, run_id: str) -> None:
        self._line.pop(run_id, None)
        self._call_next()

    def _call_next(self) -> None:
        for turn in list(self._line.values())[: self._places]:
            turn.set()
