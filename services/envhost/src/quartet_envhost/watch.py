"""Watches one worker until it ends.

1. A worker whose loop is silent, or that holds more memory or processes than its limits, is killed with all
   that it started, and told why; a silent one is asked first where it hangs (process.py 4).
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
            silence = worker.silent_seconds
            try:
                excess = await _excess(worker, limits) if silence <= limits.silence_s else ""
            except OSError as error:
                log.warning("worker was not looked at", env_id=env_id, why=str(error))
                continue
            if silence > limits.silence_s:
                await worker.kill_hung(_stopped(worker, env_id, f"was silent for {silence:.0f} s"))
            elif excess:
                worker.kill(_stopped(worker, env_id, excess))
        return ended.result()
    finally:
        ended.cancel()


def _stopped(worker: WorkerProcess, env_id: str, why: str) -> str:
    log.warning("worker stopped", env_id=env_id, pid=worker.pid, why=why)
    return f"worker {worker.pid} of environment {env_id!r} {why} and was stopped"


async def _excess(worker: WorkerProcess, limits: Limits) -> str:
    """Which limit of what it holds the worker is over; empty for none."""
    # In a thread: the process table is read, which takes milliseconds on a busy machine.
    running = await asyncio.to_thread(processes.tree, worker.pid)
    if len(running) > limits.processes:
        return f"had {len(running)} processes (max_processes = {limits.processes})"
    most = round(limits.memory_gb * GIB)
    held = await asyncio.to_thread(processes.memory_bytes, running, most)
    if held > most:
        return f"held {held / GIB:.2f} GiB (max_memory_gb = {limits.memory_gb:g})"
    return ""
