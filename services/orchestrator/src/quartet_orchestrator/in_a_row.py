"""Groups of one environment that failed in a row: one after the other as they were sent out, not as they end.

1. Failures are quick, and come while sound groups are still sampled: a group that is under way ends a row, as
   one that went well does. It joins the rows on both sides of it once it has failed, too.
2. One that says nothing of the environment, such as one that somebody cancelled, neither ends a row nor is
   counted in it.
3. At most REMEMBERED that failed are known: the last of them.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

#: As many as are under way at once, and some.
REMEMBERED = 4096


class InARow:
    """Of one environment."""

    def __init__(self) -> None:
        self._sent = 0
        self._turns: dict[int, int] = {}
        # By its turn, of a group that failed: why; None of one that says nothing.
        self._failed: dict[int, str | None] = {}
        #: Of those that failed last: how many, and why the last of them; none once another one went well.
        self.latest: tuple[int, str] | None = None

    def sent(self, group: int) -> None:
        """A group goes out."""
        self._turns[group] = self._sent
        self._sent += 1

    def went_well(self, group: int) -> None:
        """It is complete."""
        del self._turns[group]
        self.latest = None

    def failed(self, group: int, why: str | None) -> int:
        """It failed, or (None) says nothing. How many did in a row, with it."""
        turn = self._turns.pop(group)
        self._failed[turn] = why
        if len(self._failed) > REMEMBERED:
            del self._failed[next(iter(self._failed))]
        row = [*self._from(turn, -1), *self._from(turn + 1, 1)]
        length = sum(one is not None for one in row)
        if why is not None:
            self.latest = length, why
        return length

    def _from(self, turn: int, step: int) -> Iterator[str | None]:
        for at in count(turn, step):
            if at not in self._failed:
                return
            yield self._failed[at]
