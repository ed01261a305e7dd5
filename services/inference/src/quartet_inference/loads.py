"""Adapters that are being loaded: of each run one at a time, to its end, unless it is given up.

1. Whoever asks for a run that is being loaded waits for that load, and loads it where that failed or came to
   an earlier version.
2. A load goes on when those who wait have left: over a narrow way an adapter takes longer to come than any of
   them waits, and would begin anew with each.
3. Who gives a load up has the last word: nothing is served by it, and who waits for it is told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from quartet.errors import QuartetError
from quartet.kit.context import background
from quartet.kit.shielded import shielded

from quartet_inference.engine import ServedWeights, adapter_gone

Load = Callable[[], Coroutine[Any, Any, ServedWeights]]


class Loads:
    """Loads by run. For one event loop."""

    def __init__(self) -> None:
        """Nothing is being loaded."""
        self._under_way: dict[str, asyncio.Task[ServedWeights]] = {}

    async def reach(self, run_id: str, version: int, load: Load) -> ServedWeights:
        """What is served of a run, at this version or a later one, which `load` comes to.

        Errors: those of `load`; NOT_READY where it is given up.
        """
        while (before := self._under_way.get(run_id)) is not None:
            await asyncio.wait({before})
            if before.cancelled():
                raise _given_up(run_id)
            if before.exception() is None and before.result().version >= version:
                return before.result()
        task = self._under_way[run_id] = background(load(), name=f"load-adapter-{run_id}")
        task.add_done_callback(lambda _: self._under_way.pop(run_id))
        try:
            return await shielded(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise _given_up(run_id) from None

    def give_up(self, run_id: str) -> None:
        """Load it no further; what has begun to change the engine is done whole."""
        if run_id in self._under_way:
            self._under_way[run_id].cancel()

    async def close(self) -> None:
        """Load nothing any more."""
        loads = list(self._under_way.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)


def _given_up(run_id: str) -> QuartetError:
    return QuartetError("NOT_READY", adapter_gone(run_id).message)
