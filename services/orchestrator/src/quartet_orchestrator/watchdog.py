"""The watchdog: health means that runs move, not that a port answers.

1. A run that is under way, has its turn, and has written nothing down but remarks for `limit_s` is stalled.
   The service is NOT_SERVING then, with the run and what it is doing as the reason, and SERVING again as soon
   as every run moves or rests.
2. Liveness is not touched: a restart of the orchestrator moves nothing that waits for another service. (A
   loop that is stuck fails liveness by itself, see quartet.kit.health.)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quartet.kit.health import Health

# How late a stall may be noticed.
LOOK_S = 1.0


@dataclass(frozen=True)
class Moving:
    """A run that should move."""

    run_id: str
    #: On the monotonic clock, when it last did.
    moved_at: float
    doing: str


async def watch(runs: Callable[[], Iterable[Moving]], health: Health, service: str, limit_s: float) -> None:
    """For ever."""
    while True:
        why = stalled(runs(), time.monotonic(), limit_s)
        if why:
            health.set_not_ready(service, why)
        else:
            health.set_ready(service)
        await asyncio.sleep(LOOK_S)


def stalled(runs: Iterable[Moving], now: float, limit_s: float) -> str:
    """Why not all is well; empty where it is."""
    return "; ".join(
        f"run {run.run_id!r} has moved nothing for {now - run.moved_at:.0f} s, {run.doing}"
        for run in runs
        if now - run.moved_at > limit_s
    )
