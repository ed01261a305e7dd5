"""Which saved states of a run stay.

1. The newest ones stay: as many as the run says, or where it says nothing as the trainer does (`keep_last`).
2. So do those that were saved to be kept, however many come after them.
3. No run has more than `max_states`: of one with more the oldest go, whatever was asked for, and never the
   newest.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

#: Of one run, whatever anybody asks for: each save reads the marks of all of them.
MAX_STATES = 1000


class Saved(Protocol):
    """What is asked of a state."""

    @property
    def kept(self) -> bool: ...


S = TypeVar("S", bound=Saved)


@dataclass(frozen=True, slots=True)
class Retention:
    """What the operator of a trainer says of the states of each run."""

    keep_last: int
    max_states: int = MAX_STATES

    def staying(self, states: Sequence[S], keep_last: int) -> list[S]:
        """Of a run's states, oldest first, those that stay; `keep_last` as the run says, 0 for nothing."""
        newest = len(states) - (keep_last or self.keep_last)
        wanted = [one for at, one in enumerate(states) if at >= newest or one.kept]
        return wanted[-self.max_states :]
