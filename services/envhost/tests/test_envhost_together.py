"""Members that are compared: together.py 2, and how they end."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest
from quartet.kit import context
from quartet.v1 import envhost_service_pb2, rollout_pb2
from quartet_envhost import failures
from quartet_envhost.together import Together
from stand_in_workers import Place, pool_of


async def test_a_group_is_tried_again_together_within_its_budget() -> None:
    """together.py 2."""

    class Failing(Place):
        failures = 2

        def answer(self, asked: Any) -> rollout_pb2.Rollout:
            rollout = super().answer(asked)
            if rollout.member == 1 and self.failures:
                self.failures -= 1
                rollout.failure.retryable = True
            return rollout

    for retries, tries in [(1, 2), (5, 3)]:
        worker = Failing()
        pool = pool_of(worker, places=3)
        group = envhost_service_pb2.RunRolloutsRequest(
            timeout_ms=9000, members=[0, 1, 2], max_retries=retries
        )
        rollouts = await asyncio.wait_for(pool.run_together(group), 30)
        assert worker.members == [0, 1, 2] * tries
        assert [rollouts[one].failure.retryable for one in range(3)] == [False, retries == 1, False]
        await pool.close()


@pytest.mark.parametrize(("left_s", "cut"), [(600.0, False), (0.001, True)])
async def test_a_time_limit_of_the_environments_own_is_no_deadline_of_the_call(
    left_s: float, cut: bool
) -> None:
    """pool.py 5: what a caller with more time would not mend is not tried again."""

    class Limited(Place):
        waits: ClassVar[dict[str, str]] = {}

        def answer(self, asked: Any) -> rollout_pb2.Rollout:
            return failures.failed(asked.members[0], failures.TIMEOUT, "its own limit", retryable=False)

    pool = pool_of(Limited())
    request = envhost_service_pb2.RunRolloutsRequest(timeout_ms=3_600_000, members=[0])
    _, scope = context.enter(None, left_s)
    rollout = await asyncio.wait_for(pool.run(request, 0), 30)
    scope.close()
    assert rollout.failure.retryable is cut
    assert ("the deadline of the call" in rollout.failure.message) is cut
    await pool.close()


async def test_members_that_nobody_awaits_end() -> None:
    """together.py: the whole is cancelled with the last of its members, and not before."""
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def run() -> dict[int, rollout_pb2.Rollout]:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        raise AssertionError("cancelled before")

    together = Together(run)
    first, second = (asyncio.create_task(together.run(member)) for member in (0, 1))
    await started.wait()
    first.cancel()
    await asyncio.sleep(0.01)
    assert not cancelled.is_set()
    second.cancel()
    await asyncio.wait_for(cancelled.wait(), 60)
