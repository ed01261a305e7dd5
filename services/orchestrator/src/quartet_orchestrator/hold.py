"""Hold: the version published last stays the last one while somebody measures it.

1. While anybody holds it, `move` waits. Whoever asks to hold from `move` on waits until `moved`, and holds
   then, whatever is moved next: a step waits for those who held before it, and nobody waits for two steps.
2. Nobody holds before the first `moved`. From `end` on nobody does: who waits or holds is told why.

Pure but for the waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy

from quartet.errors import QuartetError


class Hold:
    """Who holds the version published last, and who waits to."""

    def __init__(self) -> None:
        self._holders = 0
        self._moving = True
        self._waiting: list[asyncio.Future[None]] = []
        self._let_go = asyncio.Event()
        self._let_go.set()
        self._over = asyncio.Event()
        # Set with the event.
        self._why: QuartetError | None = None

    @property
    def is_held(self) -> bool:
        """Whether `move` would wait."""
        return not self._let_go.is_set()

    async def move(self) -> None:
        """Returns once nobody holds; from now on nobody begins to."""
        self._moving = True
        await self._let_go.wait()

    def moved(self) -> None:
        """There is a last version again."""
        self._moving = False
        for turn in self._waiting:
            if not turn.done():
                self._take()
                turn.set_result(None)
        self._waiting.clear()

    def end(self, why: QuartetError) -> None:
        """No version comes after this one, and this one does not stay."""
        self._why = why
        self._over.set()
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(why)
        self._waiting.clear()

    async def ended(self) -> None:
        """Waits for the end, and raises its reason."""
        await self._over.wait()
        assert self._why is not None
        raise copy(self._why)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Waits for the version to hold. Raises what `end` is told."""
        if self._why is not None:
            raise copy(self._why)
        if self._moving:
            await self._turn()
        else:
            self._take()
        try:
            yield
        finally:
            self._give_back()

    async def _turn(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back()  # it was ours already
            raise

    def _take(self) -> None:
        self._holders += 1
        self._let_go.clear()

    def _give_back(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._let_go.set()
