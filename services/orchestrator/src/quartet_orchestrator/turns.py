"""Turns: runs that train the whole model go one after the other, because a replica of inference serves the
weights of one of them. Runs that publish adapters share the model that they are served upon, hence one place.

1. At most `places` places are taken at once; whoever finds none waits, in the order of asking. Nobody
   overtakes: a run that would share waits behind a run that waits.
2. Whoever waits is told once for whom.
3. A turn ends by `leave`, whoever had it, waits for it, or neither.

Pure but for the waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile


@dataclass(frozen=True, eq=False)
class _Turn:
    shares: bool
    come: asyncio.Event = field(default_factory=asyncio.Event)


class Turns:
    """The line of runs, and the places that they wait for."""

    def __init__(self, places: int) -> None:
        assert places > 0
        self._places = places
        # In the order of asking.
        self._line: dict[str, _Turn] = {}

    async def take(self, run_id: str, waits_for: Callable[[list[str]], None], *, shares: bool) -> None:
        """Returns once it is the run's turn; runs that share have one together. A run that is in the line
        keeps its place."""
        if run_id not in self._line:
            turn = self._line[run_id] = _Turn(shares)
            if turn not in self._called():
                waits_for(self.before(run_id))
            self._call_next()
        await self._line[run_id].come.wait()

    def leave(self, run_id: str) -> None:
        """Ends the run's turn, or its waiting; nothing where it has neither."""
        self._line.pop(run_id, None)
        self._call_next()

    def before(self, run_id: str) -> list[str]:
        """Those who asked before a run that is in the line, but for whom it shares its turn with."""
        ahead = list(takewhile(lambda one: one != run_id, self._line))
        if run_id in self._line and self._line[run_id].shares:
            while ahead and self._line[ahead[-1]].shares:
                ahead.pop()
        return ahead

    def _called(self) -> Iterator[_Turn]:
        """Those at the front of the line for whom there are places."""
        taken, shared = 0, False
        for turn in self._line.values():
            taken += not (turn.shares and shared)
            shared |= turn.shares
            if taken > self._places:
                return
            yield turn

    def _call_next(self) -> None:
        for turn in self._called():
            turn.come.set()
