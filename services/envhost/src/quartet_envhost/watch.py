"""Watches one worker until it ends.

1. A worker whose loop is silent, or that holds more memory or processes than its limits, is killed with all
   that it started, and told why.
2. Where the host itself did not run (a container that was paused, a machine out of memory), the worker was
   not silent for so long: most likely it did not run either.
3. A look that the host itself has no means for, such as a free descriptor, ends no worker that is well.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import structlog

from quartet_envhost import processes
from quartet_envhost.process import WorkerProcess

log = structlog.get_logger()

INTERVAL_S: Final = 1.0
GIB: Final = 2**30


@dataclass(frozen=True)
class Limits:
    """What a worker with everything that it starts may hold, and how long its loop may be silent."""

    memory_gb: float
    processes: int
    silence_s: float


async def watched(worker: WorkerProcess, env_id: str, limits: Limits) -> str:
    """Why the worker ended."""
    ended = asyncio.create_task(worker.wait())
    try:
        while not ended.done():
            asked = time.monotonic()
            await asyncio.wait([ended], timeout=INTERVAL_S)
            if ended.done():
                break
            worker.unheard(max(0.0, time.monotonic() - asked - INTERVAL_S))
            try:
                excess = await _excess(worker, limits)
            except OSError as error:
                log.warning("worker was not looked at", env_id=env_id, why=str(error))
                continue
            if excess:
                log.warning("worker stopped", env_id=env_id, pid=worker.pid, why=excess)
                worker.kill(f"worker {worker.pid} of environment {env_id!r} {excess} and was stopped")
        return ended.result()
    finally:
        ended.cancel()


async def _excess(worker: WorkerProcess, limits: Limits) -> str:
    """Which limit the worker is over; empty for none."""
    if worker.silent_seconds > limits.silence_s:
        return f"was silent for {worker.silent_seconds:.0f} s"
    # In a thread: the process table is read, which takes milliseconds on a busy machine.
    running = await asyncio.to_thread(processes.tree, worker.pid)
    if len(running) > limits.processes:
        return f"had {len(running)} processes (max_processes = {limits.processes})"
    most = round(limits.memory_gb * GIB)
    held = await asyncio.to_thread(processes.memory_bytes, running, most)
    if held > most:
        return f"held {held / GIB:.2f} GiB (max_memory_gb = {limits.memory_gb:g})"
    return ""
