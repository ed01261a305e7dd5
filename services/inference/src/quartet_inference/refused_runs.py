"""The runs of which a follower could not take something, until it has caught up with them or they are over.

Nobody announces the end of a run: what was refused of one that is over is looked for. Nor does anybody
announce one that is back with what was announced before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from quartet.errors import QuartetError
from quartet.weights.fetch import get_manifest

from quartet_inference.engine import ServedWeights

#: Between two questions whether a run, of which a version was refused, is still there.
GONE_SECONDS = 30.0
#: So many runs that are gone, the newest of them, are asked for.
MAX_GONE = 64


class RefusedRuns:
    """Those of one follower."""

    def __init__(
        self, channel: grpc.aio.Channel, on_gone: Callable[[str], None], on_back: Callable[[], None]
    ) -> None:
        """`on_gone` is called with a run that the publisher does not know any more, `on_back` once there is
        one again."""
        self._channel = channel
        self._on_gone, self._on_back = on_gone, on_back
        self._blamed: set[str] = set()
        self._gone: dict[str, None] = {}  # the newest last
        #: What the engine will never take, as long as its run is blamed.
        self.weights: ServedWeights | None = None

    def blame(self, run_id: str) -> None:
        """Something of a run failed; without one nothing is kept."""
        if run_id:
            self._blamed.add(run_id)
            self._gone.pop(run_id, None)

    def absolve(self, run_id: str) -> None:
        """Nothing of a run is refused any more."""
        self._blamed.discard(run_id)
        if self.weights is not None and self.weights.run_id == run_id:
            self.weights = None

    async def look(self) -> None:
        """Look for them until cancelled."""
        while True:
            await asyncio.sleep(GONE_SECONDS)
            for run_id in [*self._blamed, *self._gone]:
                try:
                    await get_manifest(self._channel, run_id)
                except QuartetError as error:
                    if error.reason == "RUN_UNKNOWN" and run_id in self._blamed:
                        self._is_gone(run_id)
                else:
                    if run_id in self._gone:
                        del self._gone[run_id]
                        self._on_back()

    def _is_gone(self, run_id: str) -> None:
        self.absolve(run_id)
        self._gone[run_id] = None
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        self._on_gone(run_id)
