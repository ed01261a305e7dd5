"""Ends and places without a process: host.py 1, 3 and 4, pool.py 4, places.py 1 and 3, together.py 1-2."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2, rollout_pb2
from quartet_envhost import host as host_module
from quartet_envhost.config import EnvHostConfig, EnvironmentConfig
from quartet_envhost.frames import Kind
from quartet_envhost.host import ActiveRequest, EnvironmentHost
from quartet_envhost.places import Places
from quartet_envhost.pool import WorkerPool
from quartet_envhost.together import Together

ADDRESSES = ["localhost:1"]


async def test_a_member_cancelled_before_its_first_step_ends() -> None:
    """Invariant 7."""

    async def never(_member: int) -> rollout_pb2.Rollout:
        raise AssertionError("cancelled before its first step")

    active = ActiveRequest(envhost_service_pb2.RunRolloutsRequest(members=[3]), unread_bytes=1)
    active.start(never, at_once=1)
    assert active.cancel() == 1
    ended = await asyncio.wait_for(active.read(), 1)
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
    await asyncio.sleep(0.05)
    assert 5 <= len(begun) <= 5 + 2, "what waits, and what ran when it became too much"
    for read in range(20):
        assert len(begun) <= read + 5 + 2
        assert await asyncio.wait_for(active.read(), 2) == large
        await asyncio.sleep(0.001)
    assert begun == list(range(20)) and not active.tasks


async def test_a_host_that_has_no_descriptor_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: whoever waits for the environment is told, and nobody waits for ever."""

    def none_left() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", none_left)
    config = EnvHostConfig(inference_addresses=ADDRESSES)
    settings = config.environment("x")
    assert settings is not None
    pool = WorkerPool("x", {}, settings, config)
    with pytest.raises(QuartetError, match="Too many open files"):
        await asyncio.wait_for(pool.open(), 10)
    await pool.close()


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
    pool._keepers = [asyncio.create_task(asyncio.sleep(60))]
    pool._info = envhost_service_pb2.EnvironmentInfo()
    pool._places.add(worker)
    return pool


async def test_listing_tasks_gives_its_place_to_the_next() -> None:
    """Invariant 7: a rollout that waits behind GetTasks goes on when that is done."""
    pool = pool_of(Place())
    tasks = asyncio.create_task(pool.tasks(envhost_service_pb2.GetTasksRequest()))
    await asyncio.sleep(0)
    request = envhost_service_pb2.RunRolloutsRequest(timeout_ms=1000)
    rollout = await asyncio.wait_for(pool.run(request, 1), 2)
    assert rollout.member == 1
    await tasks
    await pool.close()


async def test_places_go_to_those_who_asked_first() -> None:
    """places.py 1: in the order of asking, also when others give up, and never to a newcomer."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed={seed}")
    chance = random.Random(seed)
    worker = Place()
    pool = pool_of(worker, places=3)
    request = envhost_service_pb2.RunRolloutsRequest(timeout_ms=10_000)
    runs: dict[int, asyncio.Task[Any]] = {}
    given_up: set[int] = set()
    for member in range(300):
        runs[member] = asyncio.create_task(pool.run(request, member))
        if chance.random() < 0.3:  # newcomers arrive while places become free
            await asyncio.sleep(chance.choice([0, 0, 0.001]))
        if chance.random() < 0.2:
            one = chance.randrange(member + 1)
            if one not in worker.members and not runs[one].done():
                runs[one].cancel()
                given_up.add(one)
    await asyncio.wait_for(asyncio.gather(*runs.values(), return_exceptions=True), 10)
    assert worker.members == sorted(set(runs) - given_up) and given_up
    assert worker.most == 3
    await pool.close()


async def test_a_group_waits_for_places_in_one_worker_and_is_not_overtaken() -> None:
    """places.py 1 and 2: it takes them all at once, and those that asked later come later."""
    worker = Place()
    pool = pool_of(worker, places=3)
    single = envhost_service_pb2.RunRolloutsRequest(timeout_ms=10_000)
    group = envhost_service_pb2.RunRolloutsRequest(timeout_ms=10_000, members=[10, 11, 12])
    runs = [asyncio.create_task(pool.run(single, 0))]
    await asyncio.sleep(0)
    runs.append(asyncio.create_task(pool.run_together(group)))
    runs += [asyncio.create_task(pool.run(single, member)) for member in (1, 2)]
    await asyncio.wait_for(asyncio.gather(*runs), 5)
    assert worker.members[:4] == [0, 10, 11, 12] and worker.most == 3
    assert sorted(runs[1].result()) == [10, 11, 12]
    await pool.close()


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


async def test_everybody_who_waits_for_a_place_ends_with_the_pool() -> None:
    """places.py 3."""
    places = Places(per_worker=1)
    waiting = [asyncio.create_task(places.take()) for _ in range(3)]
    await asyncio.sleep(0)
    places.refuse(QuartetError("NOT_READY", "closing"))
    for one in waiting:
        with pytest.raises(QuartetError, match="closing"):
            await asyncio.wait_for(one, 1)
    with pytest.raises(QuartetError, match="closing"):
        await places.take()


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
    await asyncio.wait_for(cancelled.wait(), 1)


async def test_an_environment_that_is_being_loaded_is_not_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """host.py 3: only one that nobody loads, asks or runs makes room."""
    loading, closed = asyncio.Event(), []

    class Slow(WorkerPool):
        async def open(self) -> Any:
            await loading.wait()
            return envhost_service_pb2.EnvironmentInfo(id=self.env_id)

        async def close(self) -> None:
            closed.append(self.env_id)

    monkeypatch.setattr(host_module, "WorkerPool", Slow)
    host = EnvironmentHost(EnvHostConfig(inference_addresses=ADDRESSES, max_loaded=2))

    def describe(env_id: str) -> asyncio.Task[Any]:
        return asyncio.create_task(host.describe(envhost_service_pb2.EnvironmentRef(id=env_id)))

    first, second = describe("one"), describe("two")
    await asyncio.sleep(0)
    with pytest.raises(QuartetError, match="in use"):
        await describe("three")
    assert not closed
    loading.set()
    assert (await first).id == "one" and (await second).id == "two"
    assert (await describe("three")).id == "three" and closed == ["one"], "the one used longest ago"
    await asyncio.gather(describe("four"), describe("five"))
    assert len(host._pools) == 2, "two at once do not take the room that one has made"
