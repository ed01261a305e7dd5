"""One request of a host while it runs: its members, and their results until they are read.

1. Every member ends exactly once, as a result or a typed failure, in the order of ending; a cancelled one
   ends as CANCELLED.
2. While UNREAD_BYTES of its results wait for its reader, no further member starts: what waits is bounded by
   that and by the members that have a place at the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2, rollout_pb2

from quartet_envhost import failures

# A reader takes results as fast as they come, unless it has stalled: a few dozen of the largest then wait.
UNREAD_BYTES: Final = 128 * 1024 * 1024

# What the reader of a request is given; questions only where the client samples.
Frame = rollout_pb2.Rollout | envhost_service_pb2.ModelQuestion
# Runs one member to its end.
Run = Callable[[int], Coroutine[Any, Any, rollout_pb2.Rollout]]


class ActiveRequest:
    """The members of one RunRollouts call, and their results until they are read."""

    def __init__(
        self, request: envhost_service_pb2.RunRolloutsRequest, unread_bytes: int = UNREAD_BYTES
    ) -> None:
        """Nothing runs yet."""
        self.request = request
        self.cancelled = False
        self.started = False
        # How long one attempt at a member may take; known once the environment is loaded.
        self.attempt_s = 0.0
        # Why no turn of it can be sampled.
        self.held_up: Callable[[], str] = lambda: ""
        # How many of its members have a place in a worker, and how many places there are in those that live.
        self.placed: Callable[[], int] = lambda: 0
        self.places: Callable[[], int] = lambda: 0
        # What one of its turns waits for.
        self.waits_for: Callable[[], str] = lambda: ""
        # What its environment is, as loaded.
        self.digest: Callable[[], str] = lambda: ""
        self.tasks: set[asyncio.Task[rollout_pb2.Rollout]] = set()
        self._limit = unread_bytes
        # At most one entry for each member, with its size, and its open questions.
        self._ended: asyncio.Queue[tuple[Frame | BaseException, int]] = asyncio.Queue()
        self._unread = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def unfinished(self) -> int:
        """Members that still run."""
        return len(self.tasks) if self.started else len(self.request.members)

    @property
    def busy(self) -> bool:
        """Whether it waits for its environment or for rollouts, and not for its reader."""
        return not self.started or bool(self.tasks and self._room.is_set())

    def start(self, run: Run, at_once: int) -> None:
        """Run the members, at most so many at once; however each ends, `read` gives that."""
        self.started = True
        places = asyncio.Semaphore(at_once)
        for member in self.request.members:
            if self.cancelled:  # while the environment was being loaded
                self._put(_cancelled(member))
            else:
                task = asyncio.create_task(self._run(run, member, places))
                self.tasks.add(task)
                # A callback: a task that is cancelled before its first step runs none of its own code.
                task.add_done_callback(partial(self._note, member))

    async def read(self) -> Frame:
        """The next member that ended, or question. Raises what only the whole request can end with."""
        ended, size = await self._ended.get()
        self._unread -= size
        if self._unread < self._limit:
            self._room.set()
        if isinstance(ended, BaseException):
            raise ended
        return ended

    def cancel(self) -> int:
        """End all members as CANCELLED; how many that were, and 0 where they are ending for it already."""
        if self.cancelled:
            return 0
        self.cancelled = True
        return sum([task.cancel() for task in self.tasks]) if self.started else len(self.request.members)

    async def _run(
        self,
        run: Run,
        member: int,
        places: asyncio.Semaphore,
    ) -> rollout_pb2.Rollout:
        async with places:
            await self._room.wait()
            return await run(member)

    def _note(self, member: int, done: asyncio.Task[rollout_pb2.Rollout]) -> None:
        self.tasks.discard(done)
        self._put(_cancelled(member) if done.cancelled() else done.exception() or done.result())

    def tell(self, news: envhost_service_pb2.ModelQuestion | QuartetError) -> None:
        """Give the reader a question of a member, or what ends the whole request."""
        self._ended.put_nowait((news, 0))

    def _put(self, ended: rollout_pb2.Rollout | BaseException) -> None:
        size = ended.ByteSize() if isinstance(ended, rollout_pb2.Rollout) else 0
        self._unread += size
        if self._unread >= self._limit:
            self._room.clear()
        self._ended.put_nowait((ended, size))


def _cancelled(member: int) -> rollout_pb2.Rollout:
    return failures.failed(member, failures.CANCELLED, "cancelled by its caller", retryable=False)
