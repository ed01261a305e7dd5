"""Ends and places without a process: host.py 1, pool.py 4."""

from __future__ import annotations

import asyncio
from typing import Any

from quartet.v1 import envhost_service_pb2, rollout_pb2
from quartet_envhost.config import EnvHostConfig, EnvironmentConfig
from quartet_envhost.frames import Kind
from quartet_envhost.host import ActiveRequest
from quartet_envhost.pool import WorkerPool


async def test_a_member_cancelled_before_its_first_step_ends() -> None:
    """Invariant 7."""

    async def never() -> rollout_pb2.Rollout:
        raise AssertionError("cancelled before its first step")

    active = ActiveRequest(envhost_service_pb2.RunRolloutsRequest(members=[3]))
    active.started = True
    active.start(3, never())
    assert active.cancel() == 1
    ended = await asyncio.wait_for(active.ended.get(), 1)
    assert isinstance(ended, rollout_pb2.Rollout) and ended.member == 3
    assert ended.failure.kind == rollout_pb2.FAILURE_KIND_CANCELLED


class OnePlace:
    """A worker that takes a moment for every call."""

    alive, load = True, 0

    async def call(self, kind: Kind, _payload: bytes) -> bytes:
        self.load += 1
        await asyncio.sleep(0.05)
        self.load -= 1
        return rollout_pb2.Rollout(member=1).SerializeToString() if kind is Kind.RUN else b""


async def test_listing_tasks_gives_its_place_to_the_next() -> None:
    """Invariant 7: a rollout that waits behind GetTasks goes on when that is done."""
    settings = EnvironmentConfig(rollouts_per_worker=1)
    pool = WorkerPool("trial-env", {}, settings, EnvHostConfig(inference_addresses=["localhost:1"]))
    worker: Any = OnePlace()
    pool._keepers, pool._info = (
        [asyncio.create_task(asyncio.sleep(60))],
        envhost_service_pb2.EnvironmentInfo(),
    )
    pool._workers = [worker]
    tasks = asyncio.create_task(pool.tasks(envhost_service_pb2.GetTasksRequest()))
    await asyncio.sleep(0)
    request = envhost_service_pb2.RunRolloutsRequest(timeout_ms=1000)
    rollout = await asyncio.wait_for(pool.run(request, 1), 2)
    assert rollout.member == 1
    await tasks
    await pool.close()
