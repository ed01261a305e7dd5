"""Turns: runs that train the whole model go one after the other, because a replica of inference serves the
weights of one of them. Runs that publish adapters share the model that they are served upon, hence one place.

1. At most `places` places are taken at once; whoever finds none waits, in the order of asking. Nobody
   overtakes: a run that would share waits behind a run that waits.
2. Whoever waits is told once for whom.
3. A turn ends by `leave`, whoever had it, waits for it, or neither.
4. Who has a turn and finds no room on the trainer gives way to those who are there and to those before it:
   it waits again, at its place in the line, until one of them has left, and so does whoever asks after it.
   Where there is nobody to give way to, what fills the trainer is none of those here, and it waits by itself.
   That a run of somebody else has left there nobody tells: the first that is not there looks again every
   LOOK_AGAIN_S.

Pure but for the waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

# A trainer that has no room answers at once, and nothing is loaded for it.
LOOK_AGAIN_S = 15.0


@dataclass(eq=False)
class _Turn:
    shares: bool
    # Whether it asks the trainer for room; a run whose trainer is somebody else's does not.
    trains_here: bool
    come: asyncio.Event = field(default_factory=asyncio.Event)
    # Whether there was no room for it, and nobody has left for it since; and whether it is on the trainer.
    gave_way: bool = False
    opened: bool = False


class Turns:
    """The line of runs, and the places that they wait for."""

    def __init__(self, places: int) -> None:
        assert places > 0
        self._places = places
        # In the order of asking.
        self._line: dict[str, _Turn] = {}

    async def take(
        self, run_id: str, waits_for: Callable[[list[str]], None], *, shares: bool, trains_here: bool = True
    ) -> None:
        """Returns once it is the run's turn; runs that share have one together. A run that is in the line
        keeps its place. One that does not train here takes no room on the trainer."""
        if run_id not in self._line:
            turn = self._line[run_id] = _Turn(shares, trains_here)
            if turn not in self._called():
                waits_for(self.before(run_id))
            self._call_next()
        turn = self._line[run_id]
        while not turn.come.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await turn.come.wait()
                    return
            # Not while another looks: it would be overtaken.
            first = (one for one in self._line.values() if one.trains_here and not one.opened)
            if turn.gave_way and turn is next(first, None):
                self.has_room()

    def leave(self, run_id: str) -> None:
        """Ends the run's turn, or its waiting; nothing where it has neither."""
        left = self._line.pop(run_id, None)
        if left is not None and left.come.is_set():
            self.has_room()
        else:
            self._call_next()

    def has_room(self) -> None:
        """The trainer may have room for another one: of those who gave way for the first."""
        for turn in self._line.values():
            if turn.gave_way:
                turn.gave_way = False
                break
        self._call_next()

    def opened(self, run_id: str) -> None:
        """A run that has its turn is on the trainer."""
        self._line[run_id].opened = True

    @property
    def is_full(self) -> bool:
        """Whether somebody gave way, so that whoever asks waits until somebody has left."""
        return any(turn.gave_way for turn in self._line.values())

    def give_way(self, run_id: str) -> list[str]:
        """Has a run that has its turn `take` it again once somebody has left: to whom it gives way. Where
        there are none nothing changes."""
        before = set(takewhile(lambda one: one != run_id, self._line))
        others = [
            name
            for name, turn in self._line.items()
            if turn.trains_here and turn.come.is_set() and name != run_id and (turn.opened or name in before)
        ]
        if others:
            turn = self._line[run_id]
            turn.gave_way, turn.opened = True, False
            turn.come.clear()
        return others

    def before(self, run_id: str) -> list[str]:
        """Whom a run in the line waits for: those who asked before it, but for whom it shares its turn with;
        where it, or one of those, gave way, all who have a turn, too."""
        ahead = list(takewhile(lambda one: one != run_id, self._line))
        up_to_it = [turn for name, turn in self._line.items() if name in ahead or name == run_id]
        if any(turn.gave_way for turn in up_to_it):
            have_it = {name for name, turn in self._line.items() if turn.come.is_set()}
            return [name for name in self._line if name in have_it or name in ahead]
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
            if taken > self._places or turn.gave_way:
                return
            yield turn

    def _call_next(self) -> None:
        for turn in self._called():
            turn.come.set()
