"""What is said over and over: told once a minute, with how often it was held back since.

1. Memory is bounded: of more than MAX_REMEMBERED things the one told longest ago is forgotten, and told anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Final

TOLD_EVERY_SECONDS: Final = 60.0  # a peer that asks again every second is a line a minute
MAX_REMEMBERED: Final = 256  # more than a service's peers make at once


class Repeated:
    """The things that were told, when last, and how often each was held back since."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds."""
        self._clock = clock
        self._told: dict[Hashable, tuple[float, int]] = {}

    def held_back(self, thing: Hashable) -> int | None:
        """How often since it was told last, if it is to be told now; None: it is held back once more."""
        now = self._clock()
        at, times = self._told.get(thing, (float("-inf"), 0))
        if now - at < TOLD_EVERY_SECONDS:
            self._told[thing] = at, times + 1
            return None
        self._told.pop(thing, None)  # so that the oldest stands first
        if len(self._told) >= MAX_REMEMBERED:
            del self._told[next(iter(self._told))]
        self._told[thing] = now, 0
        return times
