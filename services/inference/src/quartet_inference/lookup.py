"""Runs that requests name and that are not served here: looked for in the background.

1. A run that is not found is looked for no more often than every LOOK_SECONDS, and once at a time: what is
   found may be an adapter that takes minutes to come.
2. No more than MAX_LOOKS are under way at once, and no more than MAX_LOOKED_FOR are remembered.
3. A look tells nobody that it failed: requests wait for a served run by themselves. But that the publisher
   has no such run is told to those who wait, and known until the next look for it (`denied`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
from quartet.errors import QuartetError

#: A request that names an unknown run makes the replica look for it no more often than this.
LOOK_SECONDS = 5.0
#: Runs that were asked for and not found are remembered for that; the oldest is forgotten first.
MAX_LOOKED_FOR = 256
#: At once: whoever names runs that do not exist must not flood the trainer.
MAX_LOOKS = 16

log = structlog.get_logger()


@dataclass
class _Look:
    began: float
    denied: bool = False  # the publisher has no such run
    ended: bool = False


class Lookup:
    """Looks by run. For one event loop."""

    def __init__(self, look: Callable[[str], Awaitable[object]], on_denied: Callable[[], None]) -> None:
        """`look` asks the publisher for a run, and raises QuartetError; `on_denied` is called where there is
        none."""
        self._look_for, self._on_denied = look, on_denied
        self._looked_for: dict[str, _Look] = {}  # the oldest comes first
        self._looks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> int:
        """Looks that have not ended."""
        return len(self._looks)

    def begin(self, run_id: str) -> None:
        """Look for a run, unless that is being done, was done just now, or too many are looked for."""
        now = asyncio.get_running_loop().time()
        looked = self._looked_for.get(run_id)
        too_soon = looked is not None and (not looked.ended or now < looked.began + LOOK_SECONDS)
        if too_soon or len(self._looks) >= MAX_LOOKS:
            return
        self._looked_for.pop(run_id, None)
        while len(self._looked_for) >= MAX_LOOKED_FOR:
            del self._looked_for[next(iter(self._looked_for))]
        begun = self._looked_for[run_id] = _Look(now)
        look = asyncio.create_task(self._look(run_id, begun))
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    def denied(self, run_id: str, since: float) -> bool:
        """Whether a look that began at `since` or later found that there is no such run."""
        looked = self._looked_for.get(run_id)
        return looked is not None and looked.denied and looked.began >= since

    async def close(self) -> None:
        """Look for nothing any more."""
        looks = list(self._looks)
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)

    async def _look(self, run_id: str, begun: _Look) -> None:
        try:
            await self._look_for(run_id)
        except QuartetError as error:
            log.info("no adapter for a request", run_id=run_id, why=str(error))
            if error.reason == "RUN_UNKNOWN":
                begun.denied = True
                self._on_denied()
        finally:
            begun.ended = True
