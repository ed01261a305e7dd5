"""Environments that run away: each is stopped within its limits and named, its neighbours do not notice, and
its worker comes back. Invariants by their module: keeping.py 1-2, watch.py 1, processes.py 1-3.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hosting import make_host, modes
from quartet.v1 import envhost_service_pb2
from quartet_envhost.host import EnvironmentHost
from rollout_outcomes import kind

pytestmark = pytest.mark.asyncio(loop_scope="session")
MODES = modes("greedy_env")


class Greedy:
    """A host with a greedy environment and a quiet one."""

    def __init__(self, host: EnvironmentHost, policy: Any, pid_file: Path) -> None:
        self.host, self.policy, self.pid_file = host, policy, pid_file

    async def run(self, env_id: str, mode: str = "ok", **fields: Any) -> list[Any]:
        args = {"pid_file": str(self.pid_file)} if env_id == "greedy-env" else {}
        request = envhost_service_pb2.RunRolloutsRequest(
            run_id="run",
            request_id=os.urandom(6).hex(),
            environment={"id": env_id, "args_json": json.dumps(args)},
            task_index=MODES.index(mode),
            timeout_ms=120_000,
            **{"members": [0], **fields},
        )
        return [rollout async for rollout in self.host.run(request)]

    def pids(self, env_id: str) -> set[int]:
        return {w.pid for pool in self.host._pools.values() if pool.env_id == env_id for w in pool.workers}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def greedy(
    envs_python: str, tmp_path_factory: pytest.TempPathFactory, templates_of_all: Any, path: dict[str, Any]
) -> AsyncIterator[Greedy]:
    """Limits that a worker of these tests reaches within seconds."""
    import scripted_inference

    policy = scripted_inference.ScriptedInference()
    inference = await scripted_inference.serve_scripted(policy)
    limits = {"max_memory_gb": 1.0, "max_processes": 20, "max_file_gb": 0.02}
    settings = {
        "inference_addresses": [inference.address],
        "python": envs_python,
        "stall_seconds": 5.0,
        "environments": {"greedy-env": {**path, **limits}, "trial-env": path},
    }
    host = make_host(settings, templates_of_all)
    yield Greedy(host, policy, tmp_path_factory.mktemp("greedy") / "pids")
    await host.close()
    await inference.stop(0)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("eats", "max_memory_gb = 1"),
        ("children_eat", "max_memory_gb = 1"),
        ("forks", "max_processes = 20"),
        ("blocks", "was silent for"),
    ],
)
async def test_an_environment_over_its_limits_is_stopped_alone(greedy: Greedy, mode: str, text: str) -> None:
    """Invariants 5 and 7: a failure that names environment and limit; the environment beside it goes on."""
    greedy.policy.delay_s = 0.0
    for env_id in ("greedy-env", "trial-env"):
        await greedy.run(env_id)
    worker, neighbours = greedy.pids("greedy-env"), greedy.pids("trial-env")
    greedy.policy.delay_s = 2.0
    beside = asyncio.create_task(greedy.run("trial-env", members=range(4)))
    started = time.monotonic()
    (rollout,) = await greedy.run("greedy-env", mode)
    assert kind(rollout) == "HOST" and rollout.failure.retryable
    assert text in rollout.failure.message and "'greedy-env'" in rollout.failure.message, rollout.failure
    assert time.monotonic() - started < 100  # of the two minutes that it has
    assert not any(r.HasField("failure") for r in await beside)
    assert greedy.pids("trial-env") == neighbours, "the worker beside it is the same"
    (again,) = await greedy.run("greedy-env", max_retries=1)
    assert not again.HasField("failure") and not greedy.pids("greedy-env") & worker


async def test_a_file_without_end_is_the_environments_error(greedy: Greedy) -> None:
    """Invariant 8: the write fails where it is made; nothing else is touched."""
    await greedy.run("greedy-env")
    worker = greedy.pids("greedy-env")
    (rollout,) = await greedy.run("greedy-env", "writes")
    assert kind(rollout) == "ENVIRONMENT" and "File too large" in rollout.failure.message, rollout.failure
    assert greedy.pids("greedy-env") == worker


async def test_nothing_that_a_worker_started_outlives_it(greedy: Greedy) -> None:
    """Also what left its process group or its session."""
    greedy.policy.delay_s = 0.0
    await greedy.run("greedy-env")
    (worker,) = greedy.pids("greedy-env")
    left = asyncio.create_task(greedy.run("greedy-env", "leaves_children"))
    async with asyncio.timeout(60):
        while not greedy.pid_file.exists() or len(greedy.pid_file.read_text().split()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    pids = [int(one) for one in greedy.pid_file.read_text().split()]
    (process,) = [w for pool in greedy.host._pools.values() for w in pool.workers if w.pid == worker]
    process.kill("a test stops it")
    (rollout,) = await left
    assert kind(rollout) == "HOST" and "a test stops it" in rollout.failure.message
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            await _gone(pid)


async def _gone(pid: int) -> None:
    """Raises ProcessLookupError once the process has ended."""
    async with asyncio.timeout(60):
        while True:
            os.kill(pid, signal.SIGCONT)
            if _is_zombie(pid):
                raise ProcessLookupError
            await asyncio.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
