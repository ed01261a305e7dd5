"""What is written down when a step has been applied: its metrics and what became of its groups, from the
journal alone, and advice.

Times are differences of the journal's own stamps. Of the first step after a resume, or after a restart, they
count from there: what lies before is time in which nothing ran.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quartet.run.config import RunConfig
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.journal_pb2 import JournalRecord
from quartet.v1.rollout_pb2 import Rollout

from quartet_orchestrator import by_replica, fates, metrics
from quartet_orchestrator.advice import advice
from quartet_orchestrator.book import Book
from quartet_orchestrator.calls import CallPlan
from quartet_orchestrator.difficulty import REPLACED
from quartet_orchestrator.parts import Own


@dataclass(frozen=True)
class Trained:
    """What came of training a batch."""

    #: As its trainer told them; a foreign one tells nothing.
    metrics: Mapping[str, float]
    #: When there was a policy to sample the first batch with; later ones begin where the one before ended.
    first_at_ms: int
    at_ms: int
    #: When all was computed that comes before its publication; of a foreign trainer as before.
    learned_at_ms: int
    #: What algorithm.advantage = "custom" goes by.
    own: Own | None = None
    #: Of each mini-batch; empty messages where its trainer compared no log-probabilities.
    verified: Sequence[tpb.LogprobVerification] = ()


async def record_step(book: Book, config: RunConfig, batch: int, trained: Trained) -> None:
    """Writes the event of a batch that was trained and published, and what is to be said of the last ones."""
    # A batch may hold hundreds of MB of rollouts.
    values, rollouts, groups = await asyncio.to_thread(_measure, book, config, batch, trained)
    after = book.state.ledger.after_training(rollouts)
    book.write(step=pb.StepEvent(step=batch + 1, metrics=values, ledger=after.to_proto(), groups=groups))
    for sentence in advice(config, list(book.state.recent)):
        book.note(sentence, warning=True)


def of_calls(book: Book, config: RunConfig, batch: int) -> Trained:
    """As Quartet's trainer answered the calls of the batch."""
    plan = CallPlan.of(config, book.state.earlier_ends, book.state.earlier_saving)
    first, last = plan.first_of(batch), plan.published_by(batch)
    calls = [_answer(book, seq_id).call.forward_backward for seq_id in range(first, last, 2)]
    steps = [_answer(book, seq_id).call.optim_step for seq_id in range(first + 1, last, 2)]
    minibatches = config.algorithm.num_minibatches
    return Trained(
        metrics.of_training(metrics.over_calls(calls, minibatches), steps),
        _answer(book, plan.published_by(-1)).at_ms,
        _answer(book, last).at_ms,
        _answer(book, last - 1).at_ms,
        verified=[one.verification for one in calls[:minibatches]],
    )


def of_acks(book: Book, batch: int) -> Trained:
    """As a foreign trainer acknowledged its groups."""
    acked = [book.journal.select("acked", group=group) for group in book.closed_batch(batch).groups]
    first = book.journal.select("dispatched", group=0)
    at_ms = max(record.at_ms for (record,) in acked)
    return Trained({}, first[0].at_ms, at_ms, at_ms)


def _measure(
    book: Book, config: RunConfig, batch: int, trained: Trained
) -> tuple[dict[str, float], int, list[pb.GroupFate]]:
    """The metrics of the step, how many rollouts it trained, and what became of the groups that were
    dispatched for it."""
    (closed,) = book.journal.select("batch", step=batch + 1)
    scored: list[metrics.Scored] = []
    too_little: list[metrics.Scored] = []
    losses: dict[str, metrics.Losses] = {}
    groups: dict[int, list[Rollout]] = {number: [] for number in closed.batch.groups}
    given_up: list[pb.GroupFate] = []
    for record in book.journal.select("dispatched", step=batch + 1):
        number, env_id = record.dispatched.group, config.env[record.dispatched.environment].label
        attempts = book.attempts(number)
        good = [rollout for rollout in attempts if not rollout.HasField("failure")]
        by_hosts = sum(rollout.failed_attempts for rollout in attempts)
        reasons = [one.discarded.reason for one in book.journal.select("discarded", group=number)]
        replaced = sum(reason in REPLACED for reason in reasons)  # it teaches too little
        lost = metrics.Losses(len(attempts) - len(good) + by_hosts, replaced)
        losses[env_id] = losses.get(env_id, metrics.Losses()) + lost
        given_up += [pb.GroupFate(group=number, discarded=reason) for reason in reasons]
        if number in groups:
            groups[number] = sorted(good, key=lambda rollout: rollout.member)
            scored += [metrics.Scored(env_id, number, rollout) for rollout in good]
        elif replaced:
            # Without what was sampled: they may be many times a batch.
            earned = [Rollout(reward=rollout.reward, parts=rollout.parts) for rollout in good]
            too_little += [metrics.Scored(env_id, number, rollout) for rollout in earned]
    before_ms = book.state.last_step_at_ms or trained.first_at_ms
    if book.part_began_at_ms <= trained.at_ms:  # else all of the step lies before
        before_ms = max(before_ms, book.part_began_at_ms)
    closed_ms = max(before_ms, closed.at_ms)
    # The publication waited for what was measured of the version before.
    measured_ms = max((record.at_ms for record in book.journal.select("eval", step=batch)), default=0)
    waited_s = _seconds(measured_ms - max(closed_ms, trained.learned_at_ms))
    times = metrics.StepTimes(
        step_s=_seconds(trained.at_ms - before_ms),
        wait_rollouts_s=_seconds(closed_ms - before_ms),
        wait_evaluation_s=waited_s,
        train_s=max(0.0, _seconds(trained.at_ms - closed_ms) - waited_s),
    )
    credited = fates.credited(config.algorithm, list(groups.values()), trained.own)
    values = metrics.of_step(
        batch,
        scored,
        {**trained.metrics, **_by_replica(book, trained, credited)},
        times,
        losses,
        config.versions_per_step,
        config.algorithm.overlong_penalty,
        too_little,
    )
    told = fates.trained(config.algorithm, list(groups), list(groups.values()), credited)
    return values, len(scored), list(fates.bounded([*told, *given_up]))


def _by_replica(book: Book, trained: Trained, credited: fates.Credited) -> dict[str, float]:
    if not credited or not trained.verified:
        return {}
    found = by_replica.differences(trained.verified, [rollouts for rollouts, _ in credited])
    named = by_replica.bounded(found, book.state.replicas)
    return {f"{metrics.OF_REPLICAS}/{replica}": value for replica, value in named.items()}


def _answer(book: Book, seq_id: int) -> JournalRecord:
    (record,) = book.journal.select("call", group=seq_id)
    return record


def _seconds(ms: int) -> float:
    # A clock that was set back is no negative duration.
    return max(0, ms) / 1000
