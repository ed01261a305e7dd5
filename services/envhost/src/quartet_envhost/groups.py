"""Rollouts that wait for the others of their group, to be scored with them.

1. Every member that enters a group either joins its scoring or leaves it; the last one to do so starts the
   scoring, of those that joined, in the order of their numbers, whichever ended first.
2. A member that waits is released by the end of the scoring, by what the scoring raised, or by its own
   cancellation; the scoring ends with the last who waits for it.
3. A member that does not end in its time is OutOfTime, and holds nobody up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from quartet.kit.own_tasks import CONTROL
from quartet.v1 import envhost_service_pb2

Score = Callable[[list[Any]], Awaitable[None]]


class OutOfTime(Exception):
    """A member did not end in its time."""


class Group:
    """The members of one request."""

    def __init__(self, size: int, score: Score, complete: Callable[[], object]) -> None:
        """`complete` is called when nobody enters any more."""
        self._missing = size
        self._score = score
        self._complete = complete
        self._states: dict[int, Any] = {}
        self._scored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._scoring: asyncio.Task[None] | None = None
        self._waiting = 0

    async def join(self, member: int, state: Any) -> None:
        """Have the state of this member scored with the others; returns when that is done."""
        self._states[member] = state
        self._waiting += 1
        try:
            self._settle()
            await asyncio.shield(self._scored)
        except asyncio.CancelledError:
            self._complete()
            if self._waiting == 1 and self._scoring is not None:
                self._scoring.cancel()
            raise
        finally:
            self._waiting -= 1

    def leave(self) -> None:
        """There is nothing to score of this member."""
        self._settle()

    def _settle(self) -> None:
        self._missing -= 1
        if self._missing:
            return
        self._complete()
        if self._states:
            self._scoring = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._score([self._states[member] for member in sorted(self._states)])
        except CONTROL:  # by the last who waited, or by itself, as where it awaits such a task
            self._scored.cancel()
            raise
        # Also what would end the process, with the rollouts beside it: each member raises it, as if alone.
        except BaseException as error:  # noqa: BLE001 - the environment's own code
            self._scored.set_exception(error)
        else:
            self._scored.set_result(None)


class Groups:
    """The groups that are not complete."""

    def __init__(self, score: Score) -> None:
        """`score` scores states together."""
        self._score = score
        self._open: dict[str, Group] = {}

    async def scored(
        self, request: envhost_service_pb2.RunRolloutsRequest, played: Callable[[], Awaitable[Any]]
    ) -> None:
        """Play a member, and have its state scored with those of the others; None is nothing to score."""
        group = self.enter(request)
        timeout_s = request.timeout_ms / 1000
        state = None
        try:
            async with asyncio.timeout(timeout_s) as clock:
                state = await played()
        except TimeoutError as error:
            if not clock.expired():  # one of the environment's own
                raise
            raise OutOfTime(f"not done after {timeout_s:g} s; its group was scored without it") from error
        finally:
            if state is None:
                group.leave()
        if state is not None:
            await group.join(request.members[0], state)

    def enter(self, request: envhost_service_pb2.RunRolloutsRequest) -> Group:
        """The group of the member that a request is for."""
        key = request.request_id
        if key not in self._open:
            size = len(request.members)
            self._open[key] = Group(size, self._score, partial(self._open.pop, key, None))
        return self._open[key]
