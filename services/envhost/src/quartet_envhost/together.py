"""Members of one request whose rewards compare them.

1. They run side by side on one worker and are scored once all have ended; a member that fails is left out of
   the comparison and ends no other.
2. When one fails in a way that trying again may help, all are tried again, as Verifiers itself does.
3. The request's time is over the rollouts, and as much again over the scoring of the group; the caller's own
   deadline is over both, and no rollout begins with more time than that leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from quartet.v1 import envhost_service_pb2, rollout_pb2


def asked_of(
    request: envhost_service_pb2.RunRolloutsRequest, members: Sequence[int], timeout_s: float
) -> envhost_service_pb2.RunRolloutsRequest:
    """What a worker is asked for the first of these members; `timeout_s` is the host's own limit."""
    one = envhost_service_pb2.RunRolloutsRequest()
    one.CopyFrom(request)
    del one.members[:]
    one.members.extend(members)
    one.timeout_ms = one.timeout_ms or round(1000 * timeout_s)
    return one


def within(
    asked: envhost_service_pb2.RunRolloutsRequest, left_s: float | None
) -> envhost_service_pb2.RunRolloutsRequest:
    """The same with no more time than its caller has left; itself where that is enough."""
    if left_s is None or left_s * 1000 >= asked.timeout_ms:
        return asked
    one = envhost_service_pb2.RunRolloutsRequest()
    one.CopyFrom(asked)
    one.timeout_ms = max(1, int(left_s * 1000))
    return one


def time_limit_s(asked: envhost_service_pb2.RunRolloutsRequest) -> float:
    """How long a worker has for the first member of a request; the others are those it is scored with."""
    return asked.timeout_ms / 1000 * (1 if len(asked.members) == 1 else 2)


class Together:
    """Runs the members as one; each of them is awaited for itself."""

    def __init__(self, run: Callable[[], Awaitable[Mapping[int, rollout_pb2.Rollout]]]) -> None:
        """`run` gives the rollouts of all members; it is called once, and cancelled when nobody awaits it."""
        self._run = run
        self._all: asyncio.Future[Mapping[int, rollout_pb2.Rollout]] | None = None
        self._awaited = 0

    async def run(self, member: int) -> rollout_pb2.Rollout:
        """The rollout of one member."""
        if self._all is None:
            self._all = asyncio.ensure_future(self._run())
        self._awaited += 1
        try:
            return (await asyncio.shield(self._all))[member]
        finally:
            self._awaited -= 1
            if not self._awaited:
                self._all.cancel()
