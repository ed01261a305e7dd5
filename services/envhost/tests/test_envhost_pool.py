"""Ends and places without a process: active_request.py 1-2, host.py 3-4, pool.py 4, places.py 1 and 3,
together.py 1-2, watch.py 2.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.kit import health as health_module
from quartet.kit.health import LIVENESS, Health
from quartet.v1 import envhost_service_pb2, rollout_pb2
from quartet_envhost import host as host_module
from quartet_envhost import processes
from quartet_envhost import watch as watch_module
from quartet_envhost.active_request import ActiveRequest
from quartet_envhost.config import EnvHostConfig, EnvironmentConfig
from quartet_envhost.frames import MAX_PAYLOAD_BYTES, Kind
from quartet_envhost.host import EnvironmentHost
from quartet_envhost.places import Places
from quartet_envhost.pool import WorkerPool
from quartet_envhost.process import WorkerDied, WorkerProcess
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
    assert not active.busy, "a reader that stalls is no fault of this host"
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


class Spawned:
    """A worker that loads as the test says, and whose rollouts end when it does."""

    silent_seconds = 0.0

    def __init__(self, pid: int, refusal: Exception | None, group_scoring: bool) -> None:
        self.pid, self._refusal, self._group_scoring = pid, refusal, group_scoring
        self.ended = asyncio.Event()
        self.spoke = asyncio.Event()

    @property
    def alive(self) -> bool:
        return not self.ended.is_set()

    async def open(self, settings: dict[str, Any]) -> bytes:
        if self._refusal is not None:
            raise self._refusal
        info = envhost_service_pb2.EnvironmentInfo(id=settings["id"], group_scoring=self._group_scoring)
        return info.SerializeToString()

    async def call(self, kind: Kind, payload: bytes, ask: Any = None) -> bytes:
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


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "refusal", [QuartetError("ENVIRONMENT_UNAVAILABLE", "the hub answered 503"), RuntimeError("a fault")]
)
async def test_a_respawn_that_is_refused_once_leaves_the_other_workers_alone(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    """pool.py 2 and 3: what runs beside it goes on, what is asked next is run, and it is tried again."""
    made = spawning(monkeypatch, {2: refusal})
    host = EnvironmentHost(EnvHostConfig(inference_addresses=ADDRESSES, workers=2, rollouts_per_worker=2))

    async def run(request_id: str, *members: int) -> list[rollout_pb2.Rollout]:
        request = envhost_service_pb2.RunRolloutsRequest(
            request_id=request_id, environment={"id": "x"}, members=members, timeout_ms=600_000
        )
        return [rollout async for rollout in host.run(request)]

    await host.describe(envhost_service_pb2.EnvironmentRef(id="x"))
    (pool,) = host._pools.values()
    await until(lambda: len(pool.workers) == 2)
    first = asyncio.create_task(run("first", 0, 1))
    await asyncio.sleep(0.05)
    made[1].ended.set()
    await until(lambda: len(made) == 4 and len(pool.workers) == 2)
    second = asyncio.create_task(run("second", 0, 1))
    await asyncio.sleep(0.05)
    assert list(host._pools.values()) == [pool] and made[0].alive and not second.done()
    assert (await host.describe(envhost_service_pb2.EnvironmentRef(id="x"))).workers == 2
    made[0].ended.set()
    made[3].ended.set()
    for rollout in [*await first, *await second]:
        assert "it ended" in rollout.failure.message
    await host.close()


async def test_a_refusal_is_told_where_no_worker_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """pool.py 3."""
    refusal = QuartetError("ENVIRONMENT_UNAVAILABLE", "the hub answered 503")
    made = spawning(monkeypatch, {1: refusal})
    host = EnvironmentHost(EnvHostConfig(inference_addresses=ADDRESSES))
    ref = envhost_service_pb2.EnvironmentRef(id="x")
    await host.describe(ref)
    (pool,) = host._pools.values()
    made[0].ended.set()
    with pytest.raises(QuartetError, match="503"):
        await asyncio.wait_for(pool._places.take(), 5)
    assert (await host.describe(ref)).id == "x" and len(made) == 3, "whoever asks next has it tried again"
    await host.close()


async def test_an_unforeseen_fault_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: nobody waits for ever, and the fault has a name."""
    spawning(monkeypatch, {0: AssertionError("frame of 9 bytes")})
    host = EnvironmentHost(EnvHostConfig(inference_addresses=ADDRESSES))
    with pytest.raises(QuartetError, match="AssertionError: frame of 9 bytes") as told:
        await asyncio.wait_for(host.describe(envhost_service_pb2.EnvironmentRef(id="x")), 5)
    assert told.value.reason == "INTERNAL"
    await host.close()


async def test_arguments_that_fit_into_no_frame_are_refused() -> None:
    """Invariant 8: as they came, and as they are written for a worker."""
    host = EnvironmentHost(EnvHostConfig(inference_addresses=ADDRESSES))
    for args_json in (
        json.dumps({"rows": list(range(100_000, 590_000))}, separators=(",", ":")),
        json.dumps({"text": "é" * 1_000_000}, ensure_ascii=False),
        "{}" + 4_000_000 * " ",
    ):
        assert len(args_json.encode()) < MAX_PAYLOAD_BYTES
        with pytest.raises(QuartetError, match="name a file instead") as told:
            await host.describe(envhost_service_pb2.EnvironmentRef(id="x", args_json=args_json))
        assert told.value.reason == "INVALID_CONFIG" and told.value.metadata["key"] == "args_json"
    await host.close()


async def test_a_worker_that_cannot_be_looked_at_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """watch.py 2: a host without a free descriptor ends no worker that is well, and can end one."""
    looks = 0

    def none_left(_: str) -> list[str]:
        nonlocal looks
        looks += 1
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "listdir", none_left)
    monkeypatch.setattr(watch_module, "INTERVAL_S", 0.01)
    made = spawning(monkeypatch, {})
    host = EnvironmentHost(EnvHostConfig(inference_addresses=ADDRESSES))
    await host.describe(envhost_service_pb2.EnvironmentRef(id="x"))
    await until(lambda: looks > 3)
    assert len(made) == 1 and made[0].alive
    await host.close()
    process = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    processes.kill(process.pid)
    assert await asyncio.wait_for(process.wait(), 5) == -signal.SIGKILL


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


async def test_each_attempt_is_progress() -> None:
    """host.py 4: between its retries a member is told of, although it has not ended."""

    class Failing(Place):
        def answer(self, asked: Any) -> rollout_pb2.Rollout:
            rollout = super().answer(asked)
            rollout.failure.retryable = True
            return rollout

    worker, told = Failing(), []
    pool = pool_of(worker)
    pool._progress = lambda: told.append(len(worker.members))
    request = envhost_service_pb2.RunRolloutsRequest(timeout_ms=9000, max_retries=2)
    await asyncio.wait_for(pool.run(request, 0), 10)
    assert told == [1, 2, 3]
    await pool.close()


@pytest.mark.parametrize(("together", "rollouts_s"), [(False, 60), (True, 120)])
async def test_liveness_follows_the_limits_of_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch, together: bool, rollouts_s: int
) -> None:
    """host.py 4: a rollout that its caller gave more time than this host would is no sign of a stall."""
    monkeypatch.setattr(health_module, "WATCHDOG_SECONDS", 0.02)
    monkeypatch.setattr(host_module, "BETWEEN_S", 0.1)
    made = spawning(monkeypatch, {}, group_scoring=together)
    limits = {"timeout_seconds": 0.1, "load_timeout_seconds": 0.1, "deadline_grace_seconds": 0.1}
    config = EnvHostConfig.model_validate({"inference_addresses": ADDRESSES, **limits})
    health = Health()
    host = EnvironmentHost(config, health.progress)
    health.watch_progress(host.stall_limit_s, host.busy)
    watchdog = asyncio.create_task(health.watchdog())
    request = envhost_service_pb2.RunRolloutsRequest(
        request_id="long", environment={"id": "x"}, members=[0, 1], timeout_ms=60_000
    )

    async def run() -> list[rollout_pb2.Rollout]:
        return [rollout async for rollout in host.run(request)]

    running = asyncio.create_task(run())
    await asyncio.sleep(1)
    assert host.busy() and health.why_not(LIVENESS) == ""
    assert host.stall_limit_s() == pytest.approx(0.1 + (rollouts_s + 0.1) + 0.1)
    made[0].ended.set()
    assert len(await running) == 2
    assert not host.busy() and host.stall_limit_s() == pytest.approx(0.2)
    watchdog.cancel()
    await host.close()


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


@pytest.mark.parametrize("turns", range(5))
async def test_places_are_free_also_where_a_rollout_is_cancelled_twice(turns: int) -> None:
    """pool.py 4: such as by Cancel, and by the stream that is left."""

    class Busy:
        alive, pid = True, 10**7

        async def call(self, *_: Any) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError("cancelled before")

    config = EnvHostConfig(inference_addresses=ADDRESSES, rollouts_per_worker=1)
    settings = config.environment("x")
    assert settings is not None
    pool = WorkerPool("x", {}, settings, config)
    pool._places.add(Busy())  # type: ignore[arg-type]
    request = envhost_service_pb2.RunRolloutsRequest(request_id="r", members=[0], timeout_ms=60_000)
    running = asyncio.create_task(pool.run(request, 0))
    await asyncio.sleep(0.01)
    running.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.wait_for(pool._places.take(), 5)


#: Speaks as a worker does at first, and tears down for longer than one that ends by itself may.
TAKES_DOWN = """
import pathlib, socket, struct, sys, time
line = socket.socket(fileno=int(sys.argv[1].partition("=")[2]))
line.sendall(struct.pack("<IBQ", 0, 1, 0))
while line.recv(65536):
    pass
time.sleep(1.5)
pathlib.Path({done!r}).touch()
"""


async def test_a_worker_that_is_stopped_takes_down_what_it_started(tmp_path: Path) -> None:
    done, program, python = tmp_path / "done", tmp_path / "worker.py", tmp_path / "python"
    program.write_text(TAKES_DOWN.format(done=str(done)))
    # Without what makes it the program of a worker.
    python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    worker = await WorkerProcess.spawn(str(python), {})
    await asyncio.wait_for(worker.spoke.wait(), 10)
    await worker.stop()
    assert done.exists()
