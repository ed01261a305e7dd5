"""The environment host as Prometheus sees it, read off the endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import hosting
import pytest
from quartet.kit.metrics import scraped
from quartet.v1 import envhost_service_pb2, rollout_pb2
from quartet_envhost import failures
from quartet_envhost.gauges import HostGauges
from quartet_envhost.tally import tally

pytestmark = pytest.mark.asyncio(loop_scope="session")

Scrape = Callable[[], Awaitable[dict[str, float]]]
P = "quartet_envhost_"


def series(name: str, **labels: str) -> str:
    told = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{P}{name}{{{told}}}"


def ended(failure: str) -> str:
    return series("rollouts_total", environment="trial_env", failure=failure)


async def test_workers_rollouts_and_what_ended(hosted: Any, scrape: Scrape) -> None:
    """gauges.py 1 and 2, tally.py 1 and 2."""
    in_flight = series("rollouts_in_flight", environment="trial_env")

    def since(found: dict[str, float], name: str) -> float:
        """Counters are the process's: other tests have counted, too."""
        return found.get(name, 0.0) - empty.get(name, 0.0)

    with scraped(HostGauges(hosted.host)):
        empty = await scrape()
        await hosted.run("ok", members=range(2))
        await hosted.run("setup_raises")
        good = await scrape()
        hosted.policy.delay_s = 30.0
        request = hosted.request("trial-env", members=range(3), timeout_ms=60_000)
        call = hosted.stub.RunRollouts(request, timeout=60)
        while (busy := await scrape())[in_flight] < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        call.cancel()
        # A rollout is out of flight a moment before it is counted.
        while (left := await scrape())[in_flight] or since(left, ended("CANCELLED")) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        hosted.policy.behave()
        (again,) = await hosted.run("exits_once", max_retries=1, timeout_ms=20_000)
        after = await scrape()
        unknown = hosted.ref("no-such")
        with pytest.raises(grpc.RpcError):
            describe = envhost_service_pb2.DescribeEnvironmentRequest(environment=unknown)
            await hosted.stub.DescribeEnvironment(describe, timeout=60)
        refused = await scrape()

    retries, restarts = (
        series(name, environment="trial_env") for name in ("rollout_retries_total", "worker_restarts_total")
    )

    assert in_flight not in empty, "nobody has asked this host for it"
    assert empty[f"{P}max_rollouts_in_flight"] == 64 and empty[f"{P}rollouts_waiting"] == 0
    assert good[series("workers", environment="trial_env")] == 1
    assert good[series("places", environment="trial_env")] == 256
    counted = [since(good, ended(kind)) for kind in ("NONE", "ENVIRONMENT", "TIMEOUT")]
    assert counted == [2, 1, 0]
    assert busy[in_flight] == 3 and good[in_flight] == 0
    assert since(left, ended("CANCELLED")) == 3, "their caller has left"
    assert (since(left, retries), since(after, retries)) == (0, again.failed_attempts) == (0, 1)
    assert (since(left, restarts), since(after, restarts)) == (0, 1)
    counted = [since(after, ended(kind)) for kind in ("NONE", "HOST")]
    assert counted == [3, 0], "a rollout is counted as it ended"
    assert not [name for name in refused if "no_such" in name]


async def test_what_cannot_be_loaded_is_a_number_alone(
    envs_python: str,
    scrape: Scrape,
    templates_of_all: Any,
    path: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gauges.py 1, tally.py 1"""
    for name, value in path["env"].items():  # nobody named the environment, whose settings would say it
        monkeypatch.setenv(name, value)
    settings = {"interact_only": True, "python": envs_python}
    async with hosting.serving(settings, templates_of_all) as (host, stub):
        with scraped(HostGauges(host)):
            with pytest.raises(grpc.RpcError):
                made_up = envhost_service_pb2.EnvironmentRef(id="made-up")
                describe = envhost_service_pb2.DescribeEnvironmentRequest(environment=made_up)
                await stub.DescribeEnvironment(describe, timeout=60)
            found = await scrape()
    assert found[f"{P}failed_environments"] == 1 and not [name for name in found if "made_up" in name]


async def test_a_kind_of_another_release_makes_no_series(scrape: Scrape) -> None:
    """tally.py 2"""
    newer = rollout_pb2.Rollout(member=0)
    newer.failure.kind = 99  # type: ignore[assignment]
    newer.failed_attempts = 2
    counted = tally("owner/Some-Env@1.0")
    counted.ended(newer)
    counted.ended(failures.failed(1, failures.SCORER, "why", retryable=False))
    found = await scrape()
    of = {name: value for name, value in found.items() if '"some_env"' in name and value}
    assert of == {
        series("rollouts_total", environment="some_env", failure="HOST"): 1,
        series("rollouts_total", environment="some_env", failure="SCORER"): 1,
        series("rollout_retries_total", environment="some_env"): 2,
    }
