"""The environments of a host, loaded and asked: host.py 3-4, and what their arguments may hold."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.kit import health as health_module
from quartet.kit.health import LIVENESS, Health
from quartet.v1 import envhost_service_pb2, rollout_pb2
from quartet_envhost import host as host_module
from quartet_envhost.config import EnvHostConfig
from quartet_envhost.frames import MAX_PAYLOAD_BYTES
from quartet_envhost.host import EnvironmentHost
from quartet_envhost.pool import WorkerPool
from rollout_outcomes import until
from stand_in_workers import ADDRESSES, Place, pool_of, spawning


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


async def test_what_a_heartbeat_says_of_places_is_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """host.py: those of the workers that live; and of a group that is cancelled nobody waits."""
    made = spawning(monkeypatch, {}, group_scoring=True)
    host = EnvironmentHost(EnvHostConfig(inference_addresses=ADDRESSES, workers=2, rollouts_per_worker=2))
    request = envhost_service_pb2.RunRolloutsRequest(
        request_id="r", environment={"id": "x"}, members=[0, 1], timeout_ms=600_000
    )

    async def run() -> int:
        return len([rollout async for rollout in host.run(request)])

    running = asyncio.create_task(run())
    await asyncio.wait_for(until(lambda: sum(one.calls for one in made) == 2), 60)
    (pool,) = host._pools.values()
    await asyncio.wait_for(until(lambda: len(pool.workers) == 2), 60)
    assert (host.queued("r"), host.places("r")) == (0, 4)
    next(one for one in made if not one.calls).ended.set()
    assert host.places("r") == 2
    assert host.cancel("", ["r"]) == 2
    queued = set()
    while not running.done():
        queued.add(host.queued("r"))
        await asyncio.sleep(0)
    assert queued == {0} and await running == 2
    await host.close()


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
    await asyncio.wait_for(pool.run(request, 0), 60)
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
