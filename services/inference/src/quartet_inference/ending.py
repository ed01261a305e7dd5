"""The end of an engine that nobody has asked to close: the replica says so, and ends with it.

1. InferenceService is NOT_SERVING from then on, with the reason: nobody is sent there any more.
2. SAYING_SECONDS later the process ends with an error, so that whoever supervises it starts it again. One
   that drains ends as it was about to.
3. An engine that hangs is at its end once liveness has failed for as long as it may make no progress: by then
   whoever watches liveness has had the time to restart the replica. Where nobody does, as under `quartet rl`,
   requests would wait there for ever, because heartbeats go on.
"""

from __future__ import annotations

import asyncio

from quartet.inference import INFERENCE
from quartet.kit.health import LIVENESS, Health

from quartet_inference.engine import Engine

LOOK_SECONDS = 0.25
#: Whoever watches the health service is told within half of it, and those whose requests failed are answered.
SAYING_SECONDS = 1.0


class EngineEnded(Exception):
    """The engine will never answer again, and why."""


async def end_with(engine: Engine, health: Health, stall_seconds: float) -> None:
    """Wait for the engine's end. Errors: EngineEnded."""
    hung_seconds = 0.0
    while not (why := engine.info().ended):
        # What comes next is counted in looks, not by the clock: this process may have been stopped meanwhile.
        await asyncio.sleep(LOOK_SECONDS)
        hangs = health.why_not(LIVENESS)
        hung_seconds = hung_seconds + LOOK_SECONDS if hangs else 0.0
        if hung_seconds >= stall_seconds:
            why = f"the engine hangs: {hangs}; raise stall_seconds where a step may take so long"
            break
    health.set_not_ready(INFERENCE, why)
    await asyncio.sleep(SAYING_SECONDS)
    if not health.draining.is_set():
        raise EngineEnded(why)
