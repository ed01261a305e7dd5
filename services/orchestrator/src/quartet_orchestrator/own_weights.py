"""Own weights: whether what sampled a rollout is what its run published.

A version's number tells a run's weights apart, and another run of its name, deleted before this one was made,
counted its own: a replica that was cut off meanwhile answers with them until it hears of the new run.

1. A rollout that was answered by weights which the run's trainer never published under that number becomes a
   failure of a model that was away, with nothing left of it: it is sampled again, and no token of it is
   written down.
2. Published is what the trainer said to this process, and what the journal says that it told one before it:
   all of that, where a number came out otherwise in a replay (answers.py 1). Of what is not known so the
   trainer is asked, by one at a time: replicas may serve a version before its answer is here. A trainer that
   is away is waited for: what was finished meanwhile is as good as ever. So is one that died before it could
   answer to a publication, until it has come to that version again; not while the version before it is still
   measured, behind which it is published first: that may need what the waiting rollout's group holds.
3. What a replica or a host of an earlier release does not tell is not judged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quartet.errors import QuartetError
from quartet.run.config import RunConfig
from quartet.v1 import common_pb2 as cpb
from quartet.v1 import rollout_pb2 as rpb

from quartet_orchestrator.book import Book
from quartet_orchestrator.calls import CallPlan
from quartet_orchestrator.failures import nothing_but

# Versions that rollouts under way can name are 26 at most (max_off_policy_steps); more are read back.
MAX_KNOWN = 64
# Weights of others: of one replica that is behind they are of one or two versions.
MAX_OTHERS = 64


class OwnWeights:
    """The weights of one run, by version."""

    def __init__(self, book: Book, config: RunConfig, digest_of: Callable[[int], Awaitable[bytes]]) -> None:
        """`digest_of` asks the trainer for what it publishes under a number, and waits while it is away."""
        self._book = book
        self._plan = CallPlan.of(config, book.state.earlier_ends, book.state.earlier_saving)
        self._eval, self._max_steps = config.eval, config.max_steps
        self._versions_per_step = config.versions_per_step
        self._digest_of = digest_of
        self._known: dict[int, set[int]] = {}
        # Of which the trainer said that they are not what it publishes; in the order it said so.
        self._others: dict[tuple[int, int], None] = {}
        # A manifest may have 4 MiB, and all that is under way may end with one new version.
        self._asking = asyncio.Lock()

    def published(self, version: int, digest: bytes) -> None:
        """The trainer published that, for the first time or again."""
        self._of(version).add(_id_of(digest))

    async def judge(self, rollout: rpb.Rollout) -> None:
        """Makes of a rollout that other weights answered the failure that it is; what told of them is gone
        from it. Raises RunInterrupted where the trainer is away for too long."""
        told = [(one.policy_version, one.weights_id) for one in rollout.weights]
        rollout.ClearField("weights")
        if rollout.HasField("failure"):
            return
        for version, weights_id in told:
            if not await self._is_own(version, weights_id):
                rollout.CopyFrom(self._not_own(rollout, version, weights_id))
                return

    def _not_own(self, rollout: rpb.Rollout, version: int, weights_id: int) -> rpb.Rollout:
        failure = rpb.RolloutFailure(
            kind=rpb.FAILURE_KIND_MODEL,
            reason=cpb.ERROR_REASON_RUN_NOT_SERVED,
            retryable=True,
            message=(
                f"a replica answered with weights {weights_id:016x} as version {version}, which this run's "
                f"trainer has not published: they are of an earlier run {self._book.state.run_id!r}, or of a "
                "trainer that was ended before it could say so, and the replica has heard of nothing since; "
                "see whether it reaches the trainer"
            ),
        )
        return nothing_but(failure, rollout)

    def _of(self, version: int) -> set[int]:
        """What is known to have been published under a number."""
        known = self._known.get(version)
        if known is None:
            while len(self._known) >= MAX_KNOWN:
                del self._known[next(iter(self._known))]
            known = self._known[version] = self._written(version)
        return known

    def _written(self, version: int) -> set[int]:
        """What the journal says of it."""
        step, between = divmod(version, self._versions_per_step)
        seq_id = self._plan.published_by(step - 1)
        if between or seq_id > self._book.state.applied_seq_id:
            return set()
        return {
            _id_of(record.call.publish.digest) for record in self._book.journal.select("call", group=seq_id)
        }

    async def _is_own(self, version: int, weights_id: int) -> bool:
        if weights_id in self._of(version):
            return True
        async with self._asking:
            if (version, weights_id) not in self._others and weights_id not in self._of(version):
                await self._ask(version, weights_id)
        while weights_id not in self._of(version) and self._is_on_its_way(version):
            await self._book.changed()
        return weights_id in self._of(version)

    def _is_on_its_way(self, version: int) -> bool:
        """Whether its publication is the next answer of the trainer, for which no rollout has to end."""
        step, between = divmod(version, self._versions_per_step)
        if between or self._plan.published_by(step - 1) != self._book.state.applied_seq_id + 1:
            return False
        is_due = self._eval.is_due(step - 1, self._max_steps)
        return not is_due or step - 1 in self._book.state.evaluations

    async def _ask(self, version: int, weights_id: int) -> None:
        try:
            self.published(version, await self._digest_of(version))
        except QuartetError as error:
            if error.reason != "VERSION_UNKNOWN":
                return  # it has not opened the run again, and may know it then
        if weights_id not in self._of(version):
            while len(self._others) >= MAX_OTHERS:
                del self._others[next(iter(self._others))]
            self._others[version, weights_id] = None


def _id_of(digest: bytes) -> int:
    """PolicyWeights.weights_id."""
    return int.from_bytes(digest[:8], "big")
