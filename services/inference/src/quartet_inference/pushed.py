"""Keeps an engine at what is pushed into its replica's own store.

1. What came last decides: a whole model is served alone; of adapters those that came since the last whole
   model are, each run's at its newest version, taken in the order in which they came. With a run to follow
   nothing counts but what that one pushed.
2. What does not fit is passed over from then on, and its run is told; the next one may fit. What there is no
   room for is tried again after a bounded and growing pause: nobody pushes it again. It holds up no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import takewhile

import structlog
from quartet.errors import QuartetError
from quartet.inference import UpdateRefusal, refusal
from quartet.weights.store import WeightStore
from quartet.weights.versions import Version

from quartet_inference.adoption import Adopter
from quartet_inference.updates import backoff_s

#: What a pushed version stays, whenever it is tried again.
UNFIT = frozenset({"INVALID_REQUEST", "CHECKSUM_MISMATCH"})

log = structlog.get_logger()


class Arrivals:
    """What became of the versions that the store holds, by the time of their arrival."""

    def __init__(self, run_id: str) -> None:
        """Nothing came yet."""
        self._run_id = run_id
        self.served: set[int] = set()
        self.unfit: set[int] = set()
        self.without_room: set[int] = set()

    def next(self, arrived: dict[int, Version]) -> tuple[int, Version] | None:
        """The one to take now, of those that are held."""
        for known in (self.served, self.unfit, self.without_room):
            known.intersection_update(arrived)
        fit = [
            one for one in arrived.items() if one[0] not in self.unfit and self._run_id in ("", one[1].run_id)
        ]
        adapters = list(takewhile(lambda one: bool(one[1].manifest.adapter_config), reversed(fit)))
        wanted = adapters[::-1] or fit[-1:]
        return next((one for one in wanted if one[0] not in self.served | self.without_room), None)


async def adopt_pushed(
    store: WeightStore,
    run_id: str,
    adopter: Adopter,
    on_taken: Callable[[Version], None],
    on_refused: Callable[[UpdateRefusal], None],
) -> None:
    """Keep an engine at what was pushed into its own store, until cancelled.

    `on_refused` is called with the reason when a version could not be taken.
    """
    if run_id:
        store.open_run(run_id)
    arrivals, failures, again_at = Arrivals(run_id), 0, 0.0
    clock = asyncio.get_running_loop().time
    while True:
        if arrivals.without_room and clock() >= again_at:
            arrivals.without_room.clear()
        try:
            async with asyncio.timeout_at(again_at if arrivals.without_room else None):
                arrival, version = await store.wait_arrived(arrivals.next)
        except TimeoutError:
            continue
        try:
            await adopter.adopt(version)
        except QuartetError as error:
            log.warning("pushed version refused", version=version.number, why=str(error))
            why = f"version {version.number} could not be taken: {error.message}"
            on_refused(refusal(why, version.run_id))
            if error.reason in UNFIT:
                arrivals.unfit.add(arrival)
                continue
            if not arrivals.without_room:  # else those before it would wait anew
                failures, again_at = failures + 1, clock() + backoff_s(failures)
            arrivals.without_room.add(arrival)
        else:
            arrivals.served.add(arrival)
            failures = failures if arrivals.without_room else 0
            on_taken(version)
