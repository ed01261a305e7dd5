"""How a pool keeps its workers: keeping.py 1-3, watch.py 3."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket

import pytest
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2, rollout_pb2
from quartet_envhost import processes
from quartet_envhost import watch as watch_module
from quartet_envhost.config import EnvHostConfig
from quartet_envhost.host import EnvironmentHost
from quartet_envhost.pool import WorkerPool
from rollout_outcomes import until
from stand_in_workers import ADDRESSES, spawning


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
        await asyncio.wait_for(pool.open(), 60)
    await pool.close()


@pytest.mark.parametrize(
    "refusal", [QuartetError("ENVIRONMENT_UNAVAILABLE", "the hub answered 503"), RuntimeError("a fault")]
)
async def test_a_respawn_that_is_refused_once_leaves_the_other_workers_alone(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    """keeping.py 1 and 3: what runs beside it goes on, what is asked next is run, and it is tried again."""
    made = spawning(monkeypatch, {2: refusal})
    host = EnvironmentHost(EnvHostConfig(inference_addresses=ADDRESSES, workers=2, rollouts_per_worker=2))

    async def run(request_id: str, *members: int) -> list[rollout_pb2.Rollout]:
        request = envhost_service_pb2.RunRolloutsRequest(
            request_id=request_id, environment={"id": "x"}, members=members, timeout_ms=600_000
        )
        return [rollout async for rollout in host.run(request)]

    await host.describe(envhost_service_pb2.EnvironmentRef(id="x"))
    (pool,) = host._pools.values()
    await asyncio.wait_for(until(lambda: len(pool.workers) == 2), 60)
    first = asyncio.create_task(run("first", 0, 1))
    await asyncio.wait_for(until(lambda: sum(one.calls for one in made) == 2), 60)
    made[1].ended.set()
    await asyncio.wait_for(until(lambda: len(made) == 4 and len(pool.workers) == 2), 60)
    second = asyncio.create_task(run("second", 0, 1))
    await asyncio.wait_for(until(lambda: sum(one.calls for one in made) == 4), 60)
    assert list(host._pools.values()) == [pool] and made[0].alive and not second.done()
    assert (await host.describe(envhost_service_pb2.EnvironmentRef(id="x"))).workers == 2
    made[0].ended.set()
    made[3].ended.set()
    for rollout in [*await first, *await second]:
        assert "it ended" in rollout.failure.message
    await host.close()


async def test_a_refusal_is_told_where_no_worker_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """keeping.py 1."""
    refusal = QuartetError("ENVIRONMENT_UNAVAILABLE", "the hub answered 503")
    made = spawning(monkeypatch, {1: refusal})
    host = EnvironmentHost(EnvHostConfig(inference_addresses=ADDRESSES))
    ref = envhost_service_pb2.EnvironmentRef(id="x")
    await host.describe(ref)
    (pool,) = host._pools.values()
    made[0].ended.set()
    with pytest.raises(QuartetError, match="503"):
        await asyncio.wait_for(pool._places.take(), 60)
    assert (await host.describe(ref)).id == "x" and len(made) == 3, "whoever asks next has it tried again"
    await host.close()


async def test_an_unforeseen_fault_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: nobody waits for ever, and the fault has a name."""
    spawning(monkeypatch, {0: AssertionError("frame of 9 bytes")})
    host = EnvironmentHost(EnvHostConfig(inference_addresses=ADDRESSES))
    with pytest.raises(QuartetError, match="AssertionError: frame of 9 bytes") as told:
        await asyncio.wait_for(host.describe(envhost_service_pb2.EnvironmentRef(id="x")), 60)
    assert told.value.reason == "INTERNAL"
    await host.close()


async def test_a_worker_that_cannot_be_looked_at_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """watch.py 3: a host without a free descriptor ends no worker that is well, and can end one."""
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
    await asyncio.wait_for(until(lambda: looks > 3), 60)
    assert len(made) == 1 and made[0].alive
    await host.close()
    process = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    processes.kill(process.pid)
    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL
