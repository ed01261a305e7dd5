"""Failures of rollouts: what they mean to the run, and what a person is told of them.

1. What an environment's own code, a reward function or a judge fails at is sampled again, as what its host
   calls retryable is (sampling.py 2): a judge that did not answer does the next time. Like every other
   attempt that is left out this favours what does not fail; to discard its whole group favours it more.
2. A person reads of each kind of failure of each environment when there are TELL_FROM of them, and whenever
   there are ten times as many; with how many attempts there were, and the last one's own words. Attempts
   that a host tried again by itself are counted, too. Counts are this process's.
3. A model that is away, a version that it lacks while the trainer does once more what it did, and what
   somebody cancelled, is told elsewhere (outage.py, training.py 3), or known: of these only the attempts are
   counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from quartet.kit.unknown import enum_name
from quartet.v1 import common_pb2 as cpb
from quartet.v1 import rollout_pb2 as rpb

from quartet_orchestrator.trouble import Note

# What the policy says of itself when it cannot answer anybody, whatever the rollout is.
MODEL_AWAY = frozenset(
    {
        cpb.ERROR_REASON_NOT_READY,
        cpb.ERROR_REASON_OVERLOADED,
        cpb.ERROR_REASON_RUN_NOT_SERVED,
        # Of its host, whose token is not the model's now (outage.py).
        cpb.ERROR_REASON_UNAUTHENTICATED,
    }
)
# What comes of a request for a version that the replicas do not have again yet: at once, or after its time.
LACKS_VERSION = frozenset({cpb.ERROR_REASON_VERSION_UNAVAILABLE, cpb.ERROR_REASON_DEADLINE})
# Of code that a user of the run wrote, of which the first one says what to mend.
_OWN = frozenset({rpb.FAILURE_KIND_ENVIRONMENT, rpb.FAILURE_KIND_SCORER, rpb.FAILURE_KIND_TIMEOUT})
SAMPLED_AGAIN = frozenset({rpb.FAILURE_KIND_ENVIRONMENT, rpb.FAILURE_KIND_SCORER})
# A worker that is killed once, or a tool that breaks off, takes a few rollouts along and says nothing.
TELL_FROM, TELL_OTHERS_FROM = 1, 10


def is_away(failure: rpb.RolloutFailure) -> bool:
    """Whether the model was away, and the rollout has nothing to do with it."""
    return failure.kind == rpb.FAILURE_KIND_MODEL and failure.reason in MODEL_AWAY


def lacks_version(failure: rpb.RolloutFailure) -> bool:
    """Whether that may have been why, where the trainer publishes its versions once more."""
    return failure.kind == rpb.FAILURE_KIND_MODEL and failure.reason in LACKS_VERSION


def may_end_better(failure: rpb.RolloutFailure) -> bool:
    """Whether another attempt may."""
    return failure.retryable or failure.kind in SAMPLED_AGAIN


def nothing_but(failure: rpb.RolloutFailure, rollout: rpb.Rollout) -> rpb.Rollout:
    """What is left of a rollout that is that failure: it, and what its host tried before."""
    return rpb.Rollout(
        member=rollout.member,
        failed_attempts=rollout.failed_attempts,
        earlier_failure=rollout.earlier_failure if rollout.HasField("earlier_failure") else None,
        failure=failure,
    )


class Failures:
    """Those of a run's rollouts, for training and for evaluations."""

    def __init__(self, note: Note, replays: Callable[[], bool] = lambda: False) -> None:
        """There is none yet. `replays` is Training's."""
        self._note = note
        self._replays = replays
        self._attempts = Counter[str]()
        self._failed = Counter[tuple[str, int]]()

    def ended(self, env_id: str, rollout: rpb.Rollout) -> None:
        """An attempt at a rollout of the environment has ended, well or not."""
        self._attempts[env_id] += 1 + rollout.failed_attempts
        if rollout.HasField("earlier_failure"):
            self._count(env_id, rollout.earlier_failure, rollout.failed_attempts)
        if rollout.HasField("failure"):
            self._count(env_id, rollout.failure, 1)

    def _count(self, env_id: str, failure: rpb.RolloutFailure, count: int) -> None:
        if is_away(failure) or failure.kind == rpb.FAILURE_KIND_CANCELLED:
            return
        if lacks_version(failure) and self._replays():
            return
        before = self._failed[env_id, failure.kind]
        now = self._failed[env_id, failure.kind] = before + count
        tell_at = TELL_FROM if failure.kind in _OWN else TELL_OTHERS_FROM
        while tell_at <= before:
            tell_at *= 10
        if now >= tell_at:
            kind = enum_name(rpb.FailureKind, failure.kind)
            self._note(
                f"of {self._attempts[env_id]} attempts at rollouts of environment {env_id!r} so far {now} "
                f"failed as {kind}, the last with: {failure.message}",
                warning=True,
            )
