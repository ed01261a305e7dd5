"""The clock by which a process counts how long others have been silent: it leaves out when it slept itself.

A process that was stopped (Ctrl-Z), a container that was paused, a machine that was moved, a disk that hung
under a call of the loop: whoever wakes finds timers that are due, and what the others said meanwhile is still
in its sockets. Timers come first, and by any other clock everybody was silent for all that time.

1. The clock of an event loop goes on with the loop. Of a stretch in which the loop did not run it counts
   GAP_SECONDS at most; else it is the loop's own clock, which is the monotonic one.
2. Each loop has one, from its first reading on.
"""

from __future__ import annotations

import asyncio
from typing import Final
from weakref import WeakKeyDictionary

LOOK_SECONDS: Final = 1.0
#: A loop that is merely busy is late by less; who may be silent for longer than this says something before.
GAP_SECONDS: Final = 2.0


class _Clock:
    """That of the running loop, which it looks at for as long as that is there."""

    def __init__(self) -> None:
        self._now = self._looked_at = asyncio.get_running_loop().time()
        self._look_on()

    def now(self) -> float:
        """Seconds. Also a look."""
        at = asyncio.get_running_loop().time()
        self._now += min(at - self._looked_at, GAP_SECONDS)
        self._looked_at = at
        return self._now

    def _look_on(self) -> None:
        self.now()
        asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_on)


_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, _Clock] = WeakKeyDictionary()


def awake_s() -> float:
    """Seconds by the clock of the running loop."""
    loop = asyncio.get_running_loop()
    if (clock := _clocks.get(loop)) is None:
        clock = _clocks[loop] = _Clock()
    return clock.now()
