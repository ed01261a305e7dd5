"""The one thread on which torch runs, so that the event loop never waits for a matrix.

1. Jobs run one after the other, in the order of their submission.
2. A job that began is finished, whoever stopped waiting for it.
3. At most MAX_PENDING jobs wait.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quartet.errors import QuartetError

T = TypeVar("T")

#: Callers wait for each other's jobs; more than this means that they do not.
MAX_PENDING = 64
#: A worker that has a job and finishes no micro-batch for this long is stuck; loading a large model from a
#: slow disk is not.
STUCK_SECONDS = 900.0


class Worker:
    """A single-thread executor with a bound and a count."""

    def __init__(self, threads: int, deterministic: bool) -> None:
        self._executor = ThreadPoolExecutor(1, "torch", prepare, (threads, deterministic))
        self._pending = 0

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits."""
        return self._pending > 0

    async def run(self, job: Callable[[], T]) -> T:
        """Run a job on the thread. Errors: OVERLOADED."""
        if self._pending >= MAX_PENDING:
            raise QuartetError("OVERLOADED", f"{MAX_PENDING} jobs wait for the trainer already")
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        self._pending += 1
        future = loop.run_in_executor(self._executor, context.run, job)
        future.add_done_callback(self._done)
        # Shielded: cancelling a waiting caller must not drop a job that others count on.
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Finish what was submitted and end the thread."""
        await asyncio.to_thread(self._executor.shutdown)

    def _done(self, _future: object) -> None:
        self._pending -= 1


def prepare(threads: int, deterministic: bool) -> None:
    """How torch computes; for the threads of a process, or for this thread."""
    import torch

    torch.set_num_threads(threads)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory only helps to find reads of it; it costs bandwidth.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def release_memory() -> None:
    """Give back what a closed run held: models refer to themselves, and CUDA's allocator keeps its blocks."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
