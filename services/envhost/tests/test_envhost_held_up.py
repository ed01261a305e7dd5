"""Rollouts that wait say why, and in time: real host, real worker, over gRPC."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import hosting
import pytest
import rollout_outcomes
import scripted_inference
from loopback import LOOPBACK
from quartet.kit.stream import with_heartbeats
from quartet.v1 import common_pb2, envhost_service_pb2, rollout_pb2
from quartet_envhost import service

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_rollouts_wait_for_inference_and_the_host_says_why_until_it_is_there(
    envs_python: str, templates_of_all: Any, path: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """worker.py 5"""
    monkeypatch.setattr(service, "with_heartbeats", partial(with_heartbeats, interval_s=0.1))
    policy = scripted_inference.ScriptedInference()
    inference = await scripted_inference.serve_scripted(policy, f"{LOOPBACK}:0")  # the port is taken again
    settings = {
        "inference_addresses": [inference.address],
        "python": envs_python,
        "environments": {"reverse-text": path},
    }
    request = envhost_service_pb2.RunRolloutsRequest(
        request_id="r",
        members=[0, 1],
        environment=envhost_service_pb2.EnvironmentRef(id="reverse-text"),
        timeout_ms=60_000,
    )
    said, ended = [], 0
    async with hosting.serving(settings, templates_of_all) as (_, stub), asyncio.timeout(120):
        assert await rewards(stub, request) == 2
        await inference.stop(0)
        async for frame in stub.RunRollouts(request):
            if frame.HasField("rollout"):
                assert not frame.rollout.HasField("failure")
                ended += 1
            elif frame.held_up and not said:
                said.append(frame.held_up)
                inference = await scripted_inference.serve_scripted(policy, inference.address)
    await inference.stop(0)
    assert ended == 2
    assert said[0].startswith(f"no replica of inference is in service ({inference.address}: ")


async def rewards(stub: Any, request: envhost_service_pb2.RunRolloutsRequest) -> int:
    """How many rollouts end well, of a host that has nothing to tell meanwhile."""
    frames = [frame async for frame in stub.RunRollouts(request)]
    assert not any(frame.held_up for frame in frames)
    return sum(frame.HasField("rollout") and not frame.rollout.HasField("failure") for frame in frames)


async def test_rollouts_say_what_they_wait_for_and_fail_before_the_callers_deadline(
    envs_python: str, templates_of_all: Any, path: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """worker.py 5, pool.py 5: what no waiting mends is a typed failure, not a bare DEADLINE_EXCEEDED."""
    monkeypatch.setattr(service, "with_heartbeats", partial(with_heartbeats, interval_s=0.1))
    policy = scripted_inference.ScriptedInference()
    inference = await scripted_inference.serve_scripted(policy)
    settings = {
        "inference_addresses": [inference.address],
        "python": envs_python,
        "environments": {"reverse-text": {**path, "rollouts_per_worker": 2}},
    }
    request = envhost_service_pb2.RunRolloutsRequest(
        run_id="nobody",
        request_id="r",
        members=[0, 1],
        environment=envhost_service_pb2.EnvironmentRef(id="reverse-text"),
        max_retries=2,
    )
    async with hosting.serving(settings, templates_of_all) as (_, stub), asyncio.timeout(120):
        assert await rewards(stub, request) == 2
        policy.waits_for = "run nobody, which is not served here; what is served: run r"
        frames = [frame async for frame in stub.RunRollouts(request, timeout=5)]
        assert {frame.waits_for for frame in frames} >= {policy.waits_for}
        assert not any(frame.held_up for frame in frames), "the host reaches inference"
        failures = [frame.rollout.failure for frame in frames if frame.HasField("rollout")]
        assert [kind_of(failure) for failure in failures] == ["FAILURE_KIND_MODEL"] * 2
        assert {failure.reason for failure in failures} == {common_pb2.ERROR_REASON_RUN_NOT_SERVED}
        policy.waits_for = ""
        assert await rewards(stub, request) == 2
        policy.waits_for = "Resume: decoding is paused (Pause)"
        frames = [frame async for frame in stub.RunRollouts(request, timeout=20)]
        failures = [frame.rollout.failure for frame in frames if frame.HasField("rollout")]
        assert len(failures) == 2 and all(failure.retryable for failure in failures), failures
        assert all("waited for Resume: decoding is paused" in failure.message for failure in failures)
        # Of three members one finds no place, and its time is not running.
        request.members.append(2)
        line, ended = set(), 0
        async for frame in stub.RunRollouts(request):
            line.add((frame.queued, frame.places))
            ended += frame.HasField("rollout") and not frame.rollout.HasField("failure")
            if (frame.queued, frame.places) == (1, 2):
                policy.waits_for = ""
        assert (1, 2) in line and ended == 3
    await inference.stop(0)


def kind_of(failure: rollout_pb2.RolloutFailure) -> str:
    return rollout_pb2.FailureKind.Name(failure.kind)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"run_id": "../x"}, "run_id"),
        ({"min_policy_version": 9, "exact_policy_version": 5}, "min_policy_version"),
    ],
)
async def test_weights_that_nobody_can_have_are_refused_at_once(fields: dict[str, Any], field: str) -> None:
    settings = {"inference_addresses": ["127.0.0.1:9"]}
    request = envhost_service_pb2.RunRolloutsRequest(
        request_id="r", members=[0], environment={"id": "x"}, **fields
    )
    async with hosting.serving(settings) as (_, stub):
        error = await rollout_outcomes.refusal(stub.RunRollouts(request, timeout=20))
    assert (error.reason, error.metadata["field"]) == ("INVALID_REQUEST", field)
