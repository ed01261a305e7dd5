"""What a rollout says of a policy that did not answer it."""

from __future__ import annotations

from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.v1 import common_pb2
from rollout_outcomes import kind

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
