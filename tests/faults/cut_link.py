"""Ways that are cut (tests/devices/severed.py), on a thread of their own: for a test that waits for other
processes meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack

from severed import Cut, Way, way_to

CALL_SECONDS = 10.0


class Links:
    """The thread, and its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links")
        self._opened = AsyncExitStack()

    def __enter__(self) -> Links:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._opened.aclose(), self._loop).result(CALL_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def to(self, there: str) -> Way:
        """A way to an address, which may be another one later."""
        opening = self._opened.enter_async_context(way_to(there))
        return asyncio.run_coroutine_threadsafe(opening, self._loop).result(CALL_SECONDS)

    def cut(self, way: Way, what: Cut) -> None:
        """From now on this does not arrive."""
        self._loop.call_soon_threadsafe(way.cut, what)

    def mend(self, way: Way, *, lost: bool) -> None:
        """What was held back comes, as TCP would send it again; or is lost, its connections with it."""
        self._loop.call_soon_threadsafe(lambda: way.mend(lost=lost))
