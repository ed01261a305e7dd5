"""News: everybody who waits is woken by the next change, on one event loop.

Whoever takes `next` before looking at what may change misses nothing that is told after the look.
"""

from __future__ import annotations

import asyncio


class News:
    """Told as often as one likes, each time to those who wait at that moment."""

    def __init__(self) -> None:
        """Nothing is told yet."""
        self.next = asyncio.Event()

    def tell(self) -> None:
        """Wake them."""
        self.next.set()
        self.next = asyncio.Event()

    async def wait(self) -> None:
        """Until something is told after now."""
        await self.next.wait()
