"""One request while it runs: active_request.py 1-2."""

from __future__ import annotations

import asyncio

from quartet.v1 import envhost_service_pb2, rollout_pb2
from quartet_envhost.active_request import ActiveRequest


async def test_a_member_cancelled_before_its_first_step_ends() -> None:
    """Invariant 7."""

    async def never(_member: int) -> rollout_pb2.Rollout:
        raise AssertionError("cancelled before its first step")

    active = ActiveRequest(envhost_service_pb2.RunRolloutsRequest(members=[3]), unread_bytes=1)
    active.start(never, at_once=1)
    assert (active.cancel(), active.cancel()) == (1, 0), "each is counted once"
    ended = await asyncio.wait_for(active.read(), 60)
    assert ended.member == 3
    assert ended.failure.kind == rollout_pb2.FAILURE_KIND_CANCELLED


async def test_results_that_nobody_reads_are_bounded_in_bytes() -> None:
    """Invariant 8: no member starts while that many bytes of earlier ones wait."""
    large = rollout_pb2.Rollout(stop_condition="x" * 1000)
    begun: list[int] = []

    async def run(member: int) -> rollout_pb2.Rollout:
        begun.append(member)
        await asyncio.sleep(0)
        return large

    request = envhost_service_pb2.RunRolloutsRequest(members=range(20))
    active = ActiveRequest(request, unread_bytes=5 * large.ByteSize())
    active.start(run, at_once=2)
    for _ in range(100):
        await asyncio.sleep(0)
    assert 5 <= len(begun) <= 5 + 2, "what waits, and what ran when it became too much"
    assert not active.busy, "a reader that stalls is no fault of this host"
    for read in range(20):
        assert len(begun) <= read + 5 + 2
        assert await asyncio.wait_for(active.read(), 60) == large
        await asyncio.sleep(0.001)
    assert begun == list(range(20)) and not active.tasks
