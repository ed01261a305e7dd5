"""The experts of one sequence's tokens.

1. What is told of a token is what was noted first: what was drawn behind it came from that.
2. What a prefix keeps is of the very keys that it keeps: they may have been computed anew since.
"""

from __future__ import annotations

import numpy as np

from quartet_inference.engine import Experts


class Noted:
    """From the first token on, as they are computed."""

    def __init__(self) -> None:
        """Nothing is computed."""
        self._first: list[Experts] = []
        self._count = 0
        self._present: list[Experts] = []

    def joined(self, experts: Experts) -> None:
        """The keys of so many tokens are there now, whatever was there before."""
        self._present = [experts]
        self._note_first(experts[self._count :])

    def stepped(self, experts: Experts) -> None:
        """The keys of one more."""
        self._present.append(experts)
        self._note_first(experts)

    def _note_first(self, fresh: Experts) -> None:
        if len(fresh):
            self._first.append(fresh)
            self._count += len(fresh)

    def first(self, start: int) -> Experts | None:
        """As they were noted first, from a position on; None where nothing was noted."""
        return np.concatenate(self._first)[start:] if self._first else None

    def present(self, count: int) -> Experts | None:
        """Of the keys of so many tokens that are there; None where nothing was noted."""
        return np.concatenate(self._present)[:count] if self._present else None
