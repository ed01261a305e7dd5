"""The one thread on which torch runs, so that the event loop never waits for a matrix.

1. Jobs run one after the other, in the order of their submission.
2. A job that began is finished, whoever stopped waiting for it. One that waits is run, too, unless the worker
   is closed before its turn: then nobody was told that it was done.
3. At most MAX_PENDING jobs wait, and what cleans up behind one of them.
4. A job for which the memory does not reach is OVERLOADED, with what to change; what it held is given back.
   (A call that changes a run and that it ends half way closes the run: roster.py 4. Of several ranks it ends
   the process: ranks/lead.py 2.)
5. A job that fails and leaves a device that does nothing any more ends this process: no process gets another
   context of CUDA, every later job would fail, and whoever started it starts it anew.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import structlog
from quartet.errors import QuartetError
from quartet.kit import tracing

T = TypeVar("T")

#: Callers wait for each other's jobs; more than this means that they do not.
MAX_PENDING = 64
#: A worker that has a job and for this long finishes no micro-batch, fetches no piece of a model, loads no
#: tensor, and reads and writes no piece of a state is stuck.
STUCK_SECONDS = 900.0

log = structlog.get_logger()


class Worker:
    """A single-thread executor with a bound and a count."""

    def __init__(self, threads: int, deterministic: bool) -> None:
        self._executor = ThreadPoolExecutor(1, "torch", prepare, (threads, deterministic))
        # Jobs that run or wait.
        self._pending = set[Future[Any]]()
        # Seconds of the jobs that have ended, and when the one under way began; replaced whole.
        self._computed: tuple[float, float | None] = (0.0, None)

    @property
    def pending(self) -> int:
        """Jobs that run or wait."""
        return len(self._pending)

    @property
    def computed_s(self) -> float:
        """Seconds that jobs have run, the one under way included; never less than before, in any thread."""
        now = time.monotonic()  # before the look, so that no job is counted beyond its end
        ended_s, began = self._computed
        return ended_s if began is None else ended_s + max(0.0, now - began)

    async def run(self, job: Callable[[], T], *, cleans_up: bool = False) -> T:
        """Run a job on the thread. Errors: OVERLOADED, unless it cleans up."""
        if self.pending >= MAX_PENDING and not cleans_up:
            raise QuartetError("OVERLOADED", f"{MAX_PENDING} jobs wait for the trainer already")
        submitted = self._executor.submit(contextvars.copy_context().run, self._timed, job)
        self._pending.add(submitted)
        future = asyncio.wrap_future(submitted)
        future.add_done_callback(lambda _: self._pending.discard(submitted))
        # Shielded: cancelling a waiting caller must not drop a job that others count on.
        return await asyncio.shield(future)

    async def close(self, last: Callable[[], None] | None = None) -> None:
        """Finish the job under way, do the last one and end the thread; those that wait are cancelled."""
        for job in self._pending:
            job.cancel()  # one that began goes on
        if last is not None:
            self._executor.submit(last)
        self._executor.shutdown(wait=False)
        await asyncio.to_thread(self._executor.shutdown)

    def _timed(self, job: Callable[[], T]) -> T:
        """What it takes, without the wait for its turn."""
        ended_s, began = self._computed[0], time.monotonic()
        self._computed = (ended_s, began)
        try:
            with tracing.span("compute"):
                return within_memory(job)
        except Exception as error:
            _end_without_device(error)
            raise
        finally:
            self._computed = (ended_s + time.monotonic() - began, None)


def within_memory(job: Callable[[], T]) -> T:
    """Do a job. Errors: OVERLOADED where the memory does not reach, and those of the job."""
    try:
        return job()
    except (MemoryError, RuntimeError) as error:
        why = _out_of_memory(error)
        if not why:
            raise
    # Outside of the handler: until its end the error holds on to all that the job did.
    release_memory()
    raise QuartetError(
        "OVERLOADED",
        f"the memory of the trainer does not reach ({why}); lower microbatch_tokens, set "
        "gradient_checkpointing = true (on a GPU optimizer_offload = true, too) in the trainer's "
        "configuration, train a LoRA, or give it more ranks",
    )


def _end_without_device(error: Exception) -> None:
    """End this process at once if CUDA computes nothing any more, whatever a job said of it."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as lost:
        log.error("device_lost", why=str(lost), job=f"{type(error).__name__}: {error}", exc_info=error)
        os._exit(1)


def _out_of_memory(error: BaseException) -> str:
    """What torch or Python says of memory that was not to be had; nothing of any other error."""
    import torch

    # On a CPU torch has no type of its own for it.
    said = str(error).partition("\n")[0]
    if (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or "DefaultCPUAllocator" in said
        or "CUDA error: out of memory" in said
    ):
        return said.rstrip(".") or type(error).__name__
    return ""


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
        torch.accelerator.empty_host_cache()  # offloaded moments were pinned
