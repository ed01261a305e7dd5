"""Whether the environment hosts reach inference, as they say themselves: nobody else knows their way to it.

1. Of a host that says for NOTE_AFTER_S that it reaches no replica a person reads one note, with what it knows
   of each, and one when it does again. What becomes of its rollouts is not decided here (envhosts.py 4).
2. One that has left its tier since is not told of any longer: nobody will hear that it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from quartet_orchestrator.trouble import Note, Trouble

# An outage of inference itself is told by others (outage.py, keeping_up.py), and is mostly over by then.
NOTE_AFTER_S = 15.0


class Reach:
    """As one run hears of it."""

    def __init__(
        self,
        note: Note,
        here: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is known yet. `here`: the addresses of the hosts that there are."""
        self._note = note
        self._here = here
        self._clock = clock
        # By address; of those alone that ever said so.
        self._lost: dict[str, Trouble] = {}

    @property
    def troubles(self) -> list[str]:
        """What the hosts say now, for a person; of those alone that reach no replica."""
        for address in self._lost.keys() - self._here():
            del self._lost[address]
        return [lost.said for lost in self._lost.values()]

    def heard(self, address: str, held_up: str) -> None:
        """What the host at an address says: nothing, or why no rollout of it can go on."""
        if held_up:
            lost = self._lost.setdefault(address, Trouble(self._note, self._clock))
            lost.lasts(f"the environment host at {address}: {held_up}", note_after_s=NOTE_AFTER_S)
        elif address in self._lost:
            self._lost.pop(address).over(f"the environment host at {address} reaches inference again")
