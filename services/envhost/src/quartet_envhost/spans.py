"""The span of a rollout, which outlives the worker that runs it (quartet.kit.tracing)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from quartet.kit import tracing
from quartet.kit.unknown import enum_name
from quartet.v1 import envhost_service_pb2, rollout_pb2


async def traced(
    env_id: str,
    asked: envhost_service_pb2.RunRolloutsRequest,
    answer: Callable[[], Awaitable[rollout_pb2.Rollout]],
) -> rollout_pb2.Rollout:
    """What answers it, within a span that tells how it ended."""
    with tracing.span("rollout", env=env_id, task_index=asked.task_index) as span:
        rollout = await answer()
        span.set(member=rollout.member, stop_condition=rollout.stop_condition, turns=rollout.num_turns)
        if rollout.HasField("failure"):
            kind = enum_name(rollout_pb2.FailureKind, rollout.failure.kind)
            span.set(failure=kind)
            span.fail(f"{kind}: {rollout.failure.message}")
        return rollout
