"""Who runs where, and who is next: places.py 1-4, pool.py 3."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2, rollout_pb2
from quartet_envhost import failures
from quartet_envhost.config import EnvHostConfig
from quartet_envhost.places import Places
from quartet_envhost.pool import WorkerPool
from stand_in_workers import ADDRESSES, Place, pool_of


async def test_listing_tasks_takes_no_place() -> None:
    """places.py 4: they are listed while all are taken and a rollout waits, also by a worker that comes."""
    pool = pool_of(Place())
    worker = await pool._places.take()
    request = envhost_service_pb2.RunRolloutsRequest(timeout_ms=1000)
    waits = asyncio.create_task(pool.run(request, 1))
    await asyncio.wait_for(pool.tasks(envhost_service_pb2.GetTasksRequest()), 60)
    assert not waits.done()
    pool._places.remove(worker)
    tasks = asyncio.create_task(pool.tasks(envhost_service_pb2.GetTasksRequest()))
    await asyncio.sleep(0)
    pool._places.add(worker)
    await asyncio.wait_for(tasks, 60)
    pool._places.give_back(worker)
    assert (await asyncio.wait_for(waits, 60)).member == 1
    await pool.close()


async def test_tasks_that_are_not_listed_in_time_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Place):
        async def call(self, *_: Any) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError("cancelled before")

    pool = pool_of(Slow())
    monkeypatch.setattr(pool, "_config", pool._config.model_copy(update={"load_timeout_seconds": 0.01}))
    with pytest.raises(QuartetError, match="'trial-env' did not list its tasks: no answer in time"):
        await pool.tasks(envhost_service_pb2.GetTasksRequest())
    await pool.close()


async def test_of_an_attempt_that_failed_nothing_is_held_but_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """pool.py 4: a part of a message holds all of it, and what failed may have MiB of samples."""
    monkeypatch.setattr("quartet_envhost.pool.RETRY_BASE_S", 0.0)
    pool, first = pool_of(Place()), failures.failed(1, failures.TOOL, "broke", retryable=True)
    attempts = iter([first, rollout_pb2.Rollout(member=1)])

    async def attempted(*_: Any) -> list[Any]:
        rollout = next(attempts)
        if rollout is not first:
            first.failure.message = "another"
        return [rollout]

    monkeypatch.setattr(pool, "_attempt", attempted)
    request = envhost_service_pb2.RunRolloutsRequest(timeout_ms=1000, max_retries=1)
    rollout = await pool.run(request, 1)
    assert (rollout.failed_attempts, rollout.earlier_failure.message) == (1, "broke")
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
    await asyncio.wait_for(asyncio.gather(*runs.values(), return_exceptions=True), 60)
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
    await asyncio.wait_for(asyncio.gather(*runs), 60)
    assert worker.members[:4] == [0, 10, 11, 12] and worker.most == 3
    assert sorted(runs[1].result()) == [10, 11, 12]
    await pool.close()


@pytest.mark.parametrize("turns", range(5))
async def test_places_are_free_also_where_a_rollout_is_cancelled_twice(turns: int) -> None:
    """pool.py 3: such as by Cancel, and by the stream that is left."""

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
    await asyncio.wait_for(pool._places.take(), 60)


async def test_everybody_who_waits_for_a_place_ends_with_the_pool() -> None:
    """places.py 3."""
    places = Places(per_worker=1)
    waiting = [asyncio.create_task(places.take()) for _ in range(3)]
    await asyncio.sleep(0)
    places.refuse(QuartetError("NOT_READY", "closing"))
    for one in waiting:
        with pytest.raises(QuartetError, match="closing"):
            await asyncio.wait_for(one, 60)
    with pytest.raises(QuartetError, match="closing"):
        await places.take()
