"""Samples in rows of at most so many tokens, as TRL packs them (packing_strategy="bfd", best-fit decreasing).

1. Of GROUP samples that follow each other the longest comes first, of equal ones the one that stands first.
   It goes where it leaves the least room, of equal rows into the one that has had that room the longest, and
   into a new row where it fits none.
2. Rows come group by group, in the order in which they were begun, and a row's samples in that in which they
   came to it. All this follows from the lengths alone: a fine-tuning that goes on makes the same rows.
3. A row is drawn by its number and its length. Memory holds 8 bytes of each sample, and 16 of each row.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

from quartet.cli.sft.shelf import Shelf
from quartet.v1.rollout_pb2 import Sample

#: What the library datasets hands to TRL's packing at once.
GROUP = 1000


class Rows:
    """All samples of a shelf, in rows."""

    def __init__(self, samples: Shelf, most: int) -> None:
        """No sample has more tokens than `most`."""
        self._samples = samples
        self._numbers, self._ends, self._lengths = array("Q"), array("Q", (0,)), array("Q")
        lengths = samples.lengths
        for first in range(0, len(lengths), GROUP):
            for row in fitted(lengths[first : first + GROUP], most):
                self._numbers.extend(first + number for number in row)
                self._ends.append(len(self._numbers))
                self._lengths.append(sum(lengths[first + number] for number in row))

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def numbers(self, row: int) -> Sequence[int]:
        """The samples of a row."""
        return self._numbers[self._ends[row] : self._ends[row + 1]]

    def taken(self, rows: Iterable[int]) -> list[Sample]:
        """The samples of these. Raises OSError."""
        return self._samples.taken(number for row in rows for number in self.numbers(row))


def fitted(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Rows of the numbers of so long samples."""
    rows: list[list[int]] = []
    # Rows by the room that they have, and these numbers in their order; a full row is in neither.
    roomy: dict[int, deque[list[int]]] = {}
    rooms: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        length = lengths[number]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = list[int](), most
            rows.append(row)
        else:
            room = rooms[at]
            row = roomy[room].popleft()
            if not roomy[room]:
                del rooms[at]
        row.append(number)
        if left := room - length:
            having = roomy.setdefault(left, deque())
            if not having:
                insort(rooms, left)
            having.append(row)
    return rows
