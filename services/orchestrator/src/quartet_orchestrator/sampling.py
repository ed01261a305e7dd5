"""Sampling: gets the members of one group from the environment hosts, whatever happens on the way.

1. Every member ends as a rollout that succeeded or as a failure that further attempts do not mend.
2. A member is tried MEMBER_ATTEMPTS times (each with the host's own retries inside) while another attempt may
   end better (failures.py). A host that is away costs no attempt, nor does a model that is: those are outages
   (outage.py), waited out within the run's patience. A member that a model refuses for as long, while it
   answers others, fails. While the trainer is brought up again (training.py 3), and until a replica serves
   what it published then, a version that none has yet costs no attempt either, however long that takes.
3. At most `max_concurrent` rollouts are under way at once, over training and evaluations together; of those
   that wait here the next step's go first (permits.py), at a host it is first come first served.
4. A group whose rewards compare its members is asked for whole, always, and what ended well is told of once
   all of it has ended: rewards of two attempts compare with different others.
5. What comes back is checked before anybody sees it: a reward that is no number, or one beyond MAX_REWARD, a
   success without a sampled token, with a sample that no trainer takes (quartet.trainable), or that another
   version sampled than the request pins, is a failure. A failure never has a reward. A metric that is no
   finite number is left out, of both.
6. A rollout that a teacher has judged fits into a message of its own with all that is told beside it
   (ROLLOUT_BYTES), as one from a host does: else without its conversation, or with fewer experts of its
   samples, else it is a failure.
7. An environment that a host refuses now is RunInterrupted: it was there when the run was submitted. So may
   be one that is another now (sameness.py).
8. What weights answered that the run has not published is sampled again (own_weights.py), before anybody sees
   it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from quartet import experts, task_data
from quartet.errors import QuartetError
from quartet.kit.fresh import fresh_id
from quartet.kit.options import MAX_MESSAGE_BYTES
from quartet.trainable import flaw
from quartet.v1 import common_pb2 as cpb
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import rollout_pb2 as rpb

from quartet_orchestrator.batches import covered_tokens
from quartet_orchestrator.envhosts import EnvHosts, Loaded, SignOfLife
from quartet_orchestrator.failures import Failures, is_away, lacks_version, may_end_better, nothing_but
from quartet_orchestrator.line import Line
from quartet_orchestrator.outage import Outage, RunInterrupted, backoff_s
from quartet_orchestrator.own_weights import OwnWeights
from quartet_orchestrator.parts import parts_of
from quartet_orchestrator.permits import Permits
from quartet_orchestrator.reach import Reach
from quartet_orchestrator.sameness import Sameness

# Each attempt already contains max_retries of the host; a member that fails this often fails.
MEMBER_ATTEMPTS = 3
# What a host sends at most, too. The rest of a message is for what is told beside a rollout: its group, its
# environment, its advantages.
ROLLOUT_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
# Advantages travel as float32, and may be twice as large.
MAX_REWARD = 1e38

Failed = dict[int, rpb.RolloutFailure]


@dataclass
class _Group:
    """The members of one call, while they are sampled."""

    members: frozenset[int]
    whole: bool
    missing: set[int]
    attempts: int = 0
    failed: Failed = field(default_factory=dict)
    # Of a whole group: what ended well in this attempt, and nobody was told of.
    held: list[rpb.Rollout] = field(default_factory=list)
    # Of each member: the attempts that count, and since when it has met a model that is away.
    charged: Counter[int] = field(default_factory=Counter)
    away_since: dict[int, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Another attempt, for which nothing of the last one counts where all are compared."""
        if self.whole:
            self.missing = set(self.members)
            self.failed.clear()
            self.held.clear()


class Sampling:
    """Gets rollouts from the environment hosts, for training or for an evaluation."""

    def __init__(
        self,
        hosts: EnvHosts,
        permits: Permits,
        host_outage: Outage,
        model_outage: Outage,
        judge: Callable[[rpb.Rollout], Awaitable[None]] | None = None,
        reach: Reach | None = None,
        sameness: Sameness | None = None,
        failures: Failures | None = None,
        own_weights: OwnWeights | None = None,
        line: Line | None = None,
        replays: Callable[[], bool] = lambda: False,
    ) -> None:
        """`judge` adds to a rollout that succeeded what a teacher thinks of it, before anybody is told;
        `reach` hears what the hosts say of their way to inference, `sameness` what they have loaded, `line`
        what waits there. None as `own_weights`: a foreign trainer makes them, and nobody knows them.
        `replays` is Training's."""
        self._hosts = hosts
        self._permits = permits
        self._host_outage = host_outage
        self._model_outage = model_outage
        self._judge = judge
        self._reach = reach
        self._sameness = sameness
        self._failures = failures
        self._own_weights = own_weights
        self._line = line
        self._replays = replays

    async def complete(
        self,
        request: epb.RunRolloutsRequest,
        members: Iterable[int],
        ended: Callable[[rpb.Rollout], bool],
        *,
        all_or_nothing: bool,
        whole: bool = False,
        batch: int = 0,
    ) -> Failed:
        """Runs the members; returns those that failed for good.

        `ended` is told of every attempt's rollout and says whether to go on. With all_or_nothing one member
        that failed for good ends the others, too. `whole`: the members' rewards compare them. `batch` is the
        one that waits for them: earlier ones go first.
        """
        wanted = frozenset(members)
        group = _Group(wanted, whole, set(wanted))
        tries = 0
        while group.missing:
            try:
                goes_on = await self._host_outage.through(
                    lambda: self._attempt(request, group, ended, batch, all_or_nothing=all_or_nothing)
                )
            except QuartetError as error:
                remedy = "mend its host, then resume the run"
                text = f"environment {request.environment.id!r}: {error.message}; {remedy}"
                raise RunInterrupted(text) from error
            if not goes_on:
                return group.failed
            if group.missing:
                await asyncio.sleep(backoff_s(tries))
                tries += 1
        # In one go: nobody finds a part of the group.
        for rollout in group.held:
            if not ended(rollout):
                break
        return group.failed

    async def _attempt(
        self,
        request: epb.RunRolloutsRequest,
        group: _Group,
        ended: Callable[[rpb.Rollout], bool],
        batch: int,
        *,
        all_or_nothing: bool,
    ) -> bool:
        """One stream for all missing members. Returns whether to go on."""
        if not group.missing:
            return True  # all had come before the last stream broke
        group.begin()
        asked = epb.RunRolloutsRequest()
        asked.CopyFrom(request)
        asked.request_id = f"{request.request_id}/{group.attempts}-{fresh_id()[:8]}"
        group.attempts += 1
        asked.members.extend(sorted(group.missing))
        pinned = request.exact_policy_version if request.HasField("exact_policy_version") else None
        held = len(group.missing)
        await self._permits.take(held, batch)
        began = self._model_outage.now()
        try:
            async with aclosing(self._hosts.run(asked)) as rollouts:
                async for rollout in rollouts:
                    self._host_outage.answered()
                    if isinstance(rollout, SignOfLife):
                        if self._reach is not None:
                            self._reach.heard(rollout.address, rollout.held_up)
                        if self._line is not None:
                            self._line.heard(rollout, request.environment)
                        continue
                    if isinstance(rollout, Loaded):
                        if self._sameness is not None:
                            await self._sameness.met(request.environment, rollout)
                        continue
                    self._permits.give_back(1)
                    held -= 1
                    if self._own_weights is not None:
                        await self._own_weights.judge(rollout)
                    checked(rollout, pinned)
                    if covered_tokens([rollout]):
                        self._model_outage.answered_since(began)
                    if self._judge is not None and not rollout.HasField("failure"):
                        await self._judge(rollout)
                        bounded(rollout)
                    if self._failures is not None:
                        self._failures.ended(request.environment.id, rollout)
                    if not rollout.HasField("failure"):
                        self._model_outage.answered()
                        group.missing.discard(rollout.member)
                        if group.whole:
                            group.held.append(rollout)
                            continue
                    if not ended(rollout):
                        return False
                    if rollout.HasField("failure") and self._for_good(rollout, group):
                        group.missing.discard(rollout.member)
                        group.failed[rollout.member] = rollout.failure
                        if all_or_nothing:
                            return False
        finally:
            if held:
                self._permits.give_back(held)
        return True

    def _for_good(self, rollout: rpb.Rollout, group: _Group) -> bool:
        failure, member = rollout.failure, rollout.member
        if is_away(failure):
            self._model_outage.failed(failure.message)
            return self._model_outage.outlasted(group.away_since.setdefault(member, self._model_outage.now()))
        group.away_since.pop(member, None)
        if lacks_version(failure) and self._replays():
            return False
        group.charged[member] += 1
        return not may_end_better(failure) or group.charged[member] >= MEMBER_ATTEMPTS


def checked(rollout: rpb.Rollout, exact_version: int | None = None) -> None:
    """Turns a success that cannot be one into the failure that it is; no failure keeps a reward."""
    if task_data.read(rollout.task_json) is None:  # of a host that is not ours: followers write it down
        rollout.ClearField("task_json")
    for name in [name for name, value in rollout.metrics.items() if not math.isfinite(value)]:
        del rollout.metrics[name]
    if rollout.HasField("failure"):
        return _unrewarded(rollout)
    for sample in rollout.samples:
        # Which are worth less than a batch that the trainer refuses.
        if sample.HasField("experts") and (sample.experts.start or not experts.sound(sample.experts)):
            sample.ClearField("experts")
    versions = {span.policy_version for sample in rollout.samples for span in sample.spans}
    rewards = [rollout.reward, *rollout.rewards.values()]
    rewards += [reward for part in rollout.parts for reward in (part.reward, *part.rewards.values())]
    if not all(abs(reward) <= MAX_REWARD for reward in rewards):
        wrong = ", ".join(str(reward) for reward in rewards if not abs(reward) <= MAX_REWARD)
        told = f"a reward is {wrong}; let it be within {MAX_REWARD:g} of 0"
        _fail(rollout, rpb.FAILURE_KIND_SCORER, told)
    elif sum(part.samples for part in parts_of(rollout)) != len(rollout.samples):
        _fail(rollout, rpb.FAILURE_KIND_HOST, "its parts are of more or fewer samples than it has")
    elif covered_tokens([rollout]) == 0:
        # Not the model's: the environment asked it nothing, kept no answer, or masks all of them.
        text = "no token was sampled that is to be learned"
        _fail(rollout, rpb.FAILURE_KIND_ENVIRONMENT, text)
    elif flawed := next(filter(None, map(flaw, rollout.samples)), ""):
        # Staleness is bounded by what spans say, and a trainer refuses all of a batch for one.
        _fail(rollout, rpb.FAILURE_KIND_HOST, f"{flawed}: no trainer takes that")
    elif exact_version is not None and versions != {exact_version}:
        message = f"sampled by versions {sorted(versions)}, where {exact_version} is pinned"
        _fail(rollout, rpb.FAILURE_KIND_MODEL, message)
        rollout.failure.reason = cpb.ERROR_REASON_VERSION_UNAVAILABLE


def bounded(rollout: rpb.Rollout) -> None:
    """Takes from a success what does not fit into a message: its conversation, experts of its samples, or all
    but the failure that it is then."""
    if rollout.ByteSize() <= ROLLOUT_BYTES:
        return
    del rollout.messages[:]
    rollout.ClearField("task_json")
    experts.make_room(rollout.samples, rollout.ByteSize() - ROLLOUT_BYTES)
    size = rollout.ByteSize()
    if size > ROLLOUT_BYTES:
        text = f"with what the teacher said the rollout has {size} bytes, of at most {ROLLOUT_BYTES}"
        failure = rpb.RolloutFailure(kind=rpb.FAILURE_KIND_HOST, message=text)
        rollout.CopyFrom(nothing_but(failure, rollout))


def _fail(rollout: rpb.Rollout, kind: rpb.FailureKind, message: str) -> None:
    rollout.failure.CopyFrom(rpb.RolloutFailure(kind=kind, message=message, retryable=True))
    _unrewarded(rollout)


def _unrewarded(failed: rpb.Rollout) -> None:
    failed.ClearField("reward")
    failed.ClearField("rewards")
    for part in failed.parts:
        part.ClearField("reward")
        part.ClearField("rewards")
