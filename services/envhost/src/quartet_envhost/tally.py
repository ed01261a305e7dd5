"""What ended in this host, counted for Prometheus by environment.

1. An environment is a label once it was loaded here, by its canonical name: what callers make up is none.
2. A rollout is counted once, when its caller is told how it ended; one whose caller has left is CANCELLED.
   One that failed of a kind which only a worker of another release knows is HOST.
"""

from __future__ import annotations

from functools import cache

import prometheus_client
from quartet.kit.unknown import enum_name
from quartet.v1 import rollout_pb2

from quartet_envhost import failures
from quartet_envhost.config import canonical_id

NONE = "NONE"
HOST = enum_name(rollout_pb2.FailureKind, failures.HOST)
CANCELLED = enum_name(rollout_pb2.FailureKind, failures.CANCELLED)

_ROLLOUTS = prometheus_client.Counter(
    "quartet_envhost_rollouts",
    "Rollouts that ended, by who failed; NONE: nobody did.",
    ["environment", "failure"],
)
_RETRIES = prometheus_client.Counter(
    "quartet_envhost_rollout_retries", "Attempts at rollouts that failed and were repeated.", ["environment"]
)
_RESTARTS = prometheus_client.Counter(
    "quartet_envhost_worker_restarts", "Workers that ended and were to be started again.", ["environment"]
)


class Tally:
    """Of one environment."""

    def __init__(self, environment: str) -> None:
        """All of its series are there from now on."""
        kinds = [kind for kind in rollout_pb2.FailureKind.values() if kind]
        names = [NONE, *(enum_name(rollout_pb2.FailureKind, kind) for kind in kinds)]
        self._ended = {name: _ROLLOUTS.labels(environment, name) for name in names}
        self._retries = _RETRIES.labels(environment)
        self._restarts = _RESTARTS.labels(environment)

    def ended(self, rollout: rollout_pb2.Rollout) -> None:
        """A rollout, as its caller is told."""
        failed = rollout.HasField("failure")
        kind = enum_name(rollout_pb2.FailureKind, rollout.failure.kind) if failed else NONE
        self._ended.get(kind, self._ended[HOST]).inc()
        self._retries.inc(rollout.failed_attempts)

    def left(self, rollouts: int) -> None:
        """So many, whose caller has left."""
        self._ended[CANCELLED].inc(rollouts)

    def restarted(self) -> None:
        """A worker, because it had ended."""
        self._restarts.inc()


@cache
def _of(environment: str) -> Tally:
    return Tally(environment)


def tally(env_id: str) -> Tally:
    """Of an environment that was loaded here."""
    return _of(canonical_id(env_id))
