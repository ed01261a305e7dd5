"""What a rollout says of a policy that did not answer it."""

from __future__ import annotations

from typing import Any

import pytest
from hosting import serving
from quartet.errors import QuartetError
from quartet.v1 import common_pb2, envhost_service_pb2
from rollout_outcomes import kind

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    ("reason", "retryable"), [("INTERNAL", True), ("RUN_NOT_SERVED", False), ("PROMPT_TOO_LONG", False)]
)
async def test_the_reason_of_the_policy_travels_with_the_failure(
    hosted: Any, reason: str, retryable: bool
) -> None:
    hosted.policy.errors = [QuartetError(reason, "not now")] * 2
    (rollout,) = await hosted.run("ok", max_retries=0)
    assert kind(rollout) == "MODEL" and rollout.failure.retryable == retryable
    assert common_pb2.ErrorReason.Name(rollout.failure.reason) == f"ERROR_REASON_{reason}"
    (rollout,) = await hosted.run("run_raises", max_retries=0)
    assert rollout.failure.reason == common_pb2.ERROR_REASON_UNSPECIFIED


async def test_inference_that_is_away_for_a_whole_rollout_is_no_timeout(
    envs_python: str, templates_of_all: Any, path: dict[str, Any]
) -> None:
    """Invariant 5: the run waits for its return, as for any outage."""
    settings = {
        "inference_addresses": ["127.0.0.1:9"],
        "python": envs_python,
        "environments": {"reverse-text": path, "trial-env": path},
    }
    async with serving(settings, templates_of_all) as (_, stub):
        request = envhost_service_pb2.RunRolloutsRequest(
            run_id="run", request_id="away", environment={"id": "reverse-text"}, members=[0], timeout_ms=2_000
        )
        for _ in range(3):  # it has half a second to say so, in which a busy machine may hold the worker up
            stream = stub.RunRollouts(request, timeout=60)
            (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
            if kind(rollout) != "TIMEOUT":
                break
    assert kind(rollout) == "MODEL" and rollout.failure.retryable, rollout.failure
    assert rollout.failure.reason == common_pb2.ERROR_REASON_NOT_READY


async def test_each_attempt_of_an_episode_has_its_own_refusal(hosted: Any) -> None:
    hosted.policy.errors = [
        QuartetError("PROMPT_TOO_LONG", "9 tokens, limit 4"),
        *[QuartetError("NOT_READY", "restarting")] * 2,
    ]
    request = hosted.request("compare-env", task_index=0)
    stream = hosted.stub.RunRollouts(request, timeout=60)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    too_long = "limit 4" in rollout.failure.message
    assert too_long != ("restarting" in rollout.failure.message), rollout.failure
    reason = "PROMPT_TOO_LONG" if too_long else "NOT_READY"
    assert common_pb2.ErrorReason.Name(rollout.failure.reason) == f"ERROR_REASON_{reason}"
    assert rollout.failure.retryable != too_long
