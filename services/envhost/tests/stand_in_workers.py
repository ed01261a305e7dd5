"""What stands in for worker processes: workers that a pool spawns as the test says, and a pool with one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from quartet.v1 import envhost_service_pb2, rollout_pb2
from quartet_envhost.config import EnvHostConfig, EnvironmentConfig
from quartet_envhost.frames import Kind
from quartet_envhost.pool import WorkerPool
from quartet_envhost.process import WorkerDied, WorkerProcess

ADDRESSES = ["localhost:1"]


class Spawned:
    """A worker that loads as the test says, and whose rollouts end when it does."""

    silent_seconds = 0.0
    forked = False

    def __init__(self, pid: int, refusal: Exception | None, group_scoring: bool) -> None:
        self.pid, self._refusal, self._group_scoring = pid, refusal, group_scoring
        self.ended = asyncio.Event()
        self.spoke = asyncio.Event()
        self.calls = 0

    @property
    def alive(self) -> bool:
        return not self.ended.is_set()

    def unheard(self, seconds: float) -> None:
        """It is never silent."""

    async def open(self, settings: dict[str, Any]) -> bytes:
        if self._refusal is not None:
            raise self._refusal
        info = envhost_service_pb2.EnvironmentInfo(id=settings["id"], group_scoring=self._group_scoring)
        return info.SerializeToString()

    async def call(self, kind: Kind, payload: bytes, ask: Any = None) -> bytes:
        self.calls += 1
        await self.ended.wait()
        raise WorkerDied("it ended")

    async def wait(self) -> str:
        await self.ended.wait()
        return "it ended"

    async def stop(self) -> None:
        self.ended.set()


def spawning(
    patch: pytest.MonkeyPatch, refusals: dict[int, Exception], *, group_scoring: bool = False
) -> list[Spawned]:
    """The workers that pools spawn from now on; of which some, by their number, do not load."""
    made: list[Spawned] = []

    async def spawn(*_: Any) -> Spawned:
        # No process has such a number.
        made.append(Spawned(10**7 + len(made), refusals.get(len(made)), group_scoring))
        return made[-1]

    patch.setattr(WorkerProcess, "spawn", spawn)
    return made


class Place:
    """A worker that takes a moment for every call, and notes their order."""

    alive = True

    def __init__(self) -> None:
        self.load = 0
        self.most = 0
        self.members: list[int] = []

    async def call(self, kind: Kind, payload: bytes, ask: Any = None) -> bytes:
        self.load += 1
        self.most = max(self.most, self.load)
        if kind is Kind.RUN:
            asked = envhost_service_pb2.RunRolloutsRequest.FromString(payload)
            self.members.append(asked.members[0])
        try:
            await asyncio.sleep(0.002 if kind is Kind.RUN else 0.05)
        finally:
            self.load -= 1
        return self.answer(asked).SerializeToString() if kind is Kind.RUN else b""

    def answer(self, asked: Any) -> rollout_pb2.Rollout:
        return rollout_pb2.Rollout(member=asked.members[0])


def pool_of(worker: Any, places: int = 1) -> WorkerPool:
    """A pool that is loaded, with one worker."""
    settings = EnvironmentConfig(rollouts_per_worker=places)
    pool = WorkerPool("trial-env", {}, settings, EnvHostConfig(inference_addresses=ADDRESSES))
    pool._keeper._tasks = [asyncio.create_task(asyncio.sleep(60))]
    pool._keeper._info = envhost_service_pb2.EnvironmentInfo()
    pool._places.add(worker)
    return pool
