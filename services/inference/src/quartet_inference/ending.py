"""The end of an engine that nobody has asked to close: the replica says so, and ends with it.

1. InferenceService is NOT_SERVING from then on, with the reason: nobody is sent there any more.
2. SAYING_SECONDS later the process ends with an error, so that whoever supervises it starts it again. One
   that drains ends as it was about to.
"""

from __future__ import annotations

import asyncio

from quartet.inference import INFERENCE
from quartet.kit.health import Health

from quartet_inference.engine import Engine

LOOK_SECONDS = 0.25
#: Whoever watches the health service is told within half of it, and those whose requests failed are answered.
SAYING_SECONDS = 1.0


class EngineEnded(Exception):
    """The engine will never answer again, and why."""


async def end_with(engine: Engine, health: Health) -> None:
    """Wait for the engine's end. Errors: EngineEnded."""
    while not (why := engine.info().ended):  # noqa: ASYNC110 - it comes from a thread, or a process
        await asyncio.sleep(LOOK_SECONDS)
    health.set_not_ready(INFERENCE, why)
    await asyncio.sleep(SAYING_SECONDS)
    if not health.draining.is_set():
        raise EngineEnded(why)
