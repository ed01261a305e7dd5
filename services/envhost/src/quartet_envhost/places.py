"""The places of one environment's workers: who runs where, and who is next.

1. At most `per_worker` rollouts have a place in a worker. Whoever finds none waits, in the order of asking;
   also a group that needs several places in one worker, so that nobody overtakes it for ever.
2. A place goes to the least loaded worker that is alive.
3. Everybody who waits ends when the pool is refused or closed.
4. What is no rollout takes no place, and waits for none: only for a worker that is alive.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from copy import copy

from quartet.errors import QuartetError

from quartet_envhost.process import WorkerProcess


class Places:
    """Room in the live workers of a pool."""

    def __init__(self, per_worker: int) -> None:
        """No worker is there yet."""
        self._per_worker = per_worker
        self._taken: Counter[WorkerProcess] = Counter()
        self.workers: list[WorkerProcess] = []
        # Only the first may take places; the others stay behind it.
        self._line: deque[asyncio.Event] = deque()
        # A worker was added, or there will be none.
        self._changed = asyncio.Event()
        self._refusal: QuartetError | None = None

    def add(self, worker: WorkerProcess) -> None:
        """A worker is ready."""
        self.workers.append(worker)
        self._changed.set()
        self._call_next()

    def remove(self, worker: WorkerProcess) -> None:
        """A worker has ended."""
        self.workers.remove(worker)

    def refuse(self, error: QuartetError) -> None:
        """End everybody's wait, now and from now on."""
        self._refusal = error
        self._changed.set()
        for waiting in self._line:
            waiting.set()

    async def take(self, count: int = 1) -> WorkerProcess:
        """Places in one worker; whoever takes them gives them back. Raises what `refuse` was told."""
        mine = asyncio.Event()
        self._line.append(mine)
        try:
            while True:
                self._raise_refusal()
                room = [w for w in self.workers if w.alive and self._taken[w] + count <= self._per_worker]
                if room and self._line[0] is mine:
                    chosen = min(room, key=self._taken.__getitem__)
                    self._taken[chosen] += count
                    return chosen
                mine.clear()
                await mine.wait()
        finally:
            self._line.remove(mine)
            self._call_next()

    async def one(self) -> WorkerProcess:
        """The least loaded worker, without a place in it. Raises what `refuse` was told."""
        while True:
            self._raise_refusal()
            alive = [worker for worker in self.workers if worker.alive]
            if alive:
                return min(alive, key=self._taken.__getitem__)
            self._changed.clear()
            await self._changed.wait()

    def give_back(self, worker: WorkerProcess, count: int = 1) -> None:
        """The rollouts have ended."""
        self._taken[worker] -= count
        if not self._taken[worker]:
            del self._taken[worker]
        self._call_next()

    def _raise_refusal(self) -> None:
        if self._refusal is not None:
            raise copy(self._refusal)  # one that is raised again collects tracebacks

    def _call_next(self) -> None:
        if self._line:
            self._line[0].set()
