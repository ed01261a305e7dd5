"""Typed failures of rollouts. A failure is never a reward, and says whether trying again may help."""

from __future__ import annotations

from typing import Final

from quartet.errors import QuartetError
from quartet.v1 import rollout_pb2

MODEL: Final = rollout_pb2.FAILURE_KIND_MODEL
ENVIRONMENT: Final = rollout_pb2.FAILURE_KIND_ENVIRONMENT
SCORER: Final = rollout_pb2.FAILURE_KIND_SCORER
TOOL: Final = rollout_pb2.FAILURE_KIND_TOOL
TIMEOUT: Final = rollout_pb2.FAILURE_KIND_TIMEOUT
HOST: Final = rollout_pb2.FAILURE_KIND_HOST
CANCELLED: Final = rollout_pb2.FAILURE_KIND_CANCELLED

# One line in a journal and a log; tracebacks stay in the worker's log.
MAX_MESSAGE_CHARS: Final = 500


def failure(kind: rollout_pb2.FailureKind, message: str, *, retryable: bool) -> rollout_pb2.RolloutFailure:
    """A failure with its message on one bounded line."""
    # An environment's own text may hold half a surrogate pair, which no message can carry.
    line = " ".join(message.encode("utf-8", "replace").decode().split())
    if len(line) > MAX_MESSAGE_CHARS:
        line = line[: MAX_MESSAGE_CHARS - 1] + "…"
    return rollout_pb2.RolloutFailure(kind=kind, message=line, retryable=retryable)


def of_policy(error: QuartetError, message: str, *, retryable: bool) -> rollout_pb2.RolloutFailure:
    """The policy gave no answer; whoever asked for the rollout reads why in the reason."""
    found = failure(MODEL, message, retryable=retryable)
    found.MergeFrom(rollout_pb2.RolloutFailure(reason=f"ERROR_REASON_{error.reason}"))
    return found


def failed(
    member: int, kind: rollout_pb2.FailureKind, message: str, *, retryable: bool
) -> rollout_pb2.Rollout:
    """A rollout that has nothing but its failure."""
    return rollout_pb2.Rollout(member=member, failure=failure(kind, message, retryable=retryable))
