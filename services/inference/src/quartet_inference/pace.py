"""Work on the event loop that thousands ask for at once, spread over its rounds: all else is done between.

A request takes a millisecond or two of the loop for its parsing, its rendering and its tokens. Four thousand
that come together would be one round of many seconds, in which nothing is answered, health neither.

1. A round of the loop gives at most 2 * PER_ROUND turns: PER_ROUND between two looks, a round apart.
2. Who comes when there are turns left waits for nothing; all others wait in the order in which they came.
3. Whoever waits has been admitted: the doors bound how many that are.
"""

from __future__ import annotations

import asyncio
from collections import deque

#: Some 20 ms of work, beside which what a round itself costs is little.
PER_ROUND = 16


class Pace:
    """Turns on one event loop."""

    def __init__(self) -> None:
        self._left = PER_ROUND
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait until work of a millisecond or two may be done at once."""
        loop = asyncio.get_running_loop()
        if self._left == PER_ROUND:
            loop.call_soon(self._look)
        if self._left:
            self._left -= 1
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _look(self) -> None:
        """A round after the first turn was given: give the next ones."""
        self._left = PER_ROUND
        while self._waiting and self._left:
            next_one = self._waiting.popleft()
            if not next_one.done():  # its caller may have left
                next_one.set_result(None)
                self._left -= 1
        if self._left < PER_ROUND:
            asyncio.get_running_loop().call_soon(self._look)
