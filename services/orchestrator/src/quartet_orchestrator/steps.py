"""What is written down when a step has been applied: its metrics, from the journal alone.

Times are differences of the journal's own stamps, so they are the same whether or not a restart lies between.
"""

from __future__ import annotations

import asyncio

from quartet.run.config import RunConfig
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.journal_pb2 import JournalRecord

from quartet_orchestrator import metrics
from quartet_orchestrator.book import Book
from quartet_orchestrator.calls import CallPlan
from quartet_orchestrator.state import NO_SPREAD


async def record_step(book: Book, config: RunConfig, batch: int, republished: int) -> None:
    """Writes the event of a batch that was trained and published. `republished` counts the versions that came
    out different when they were published again since the step before."""
    # A batch may hold hundreds of MB of rollouts.
    values, rollouts = await asyncio.to_thread(_measure, book, config, batch)
    values["train/versions_changed"] = float(republished)
    after = book.state.ledger.after_training(rollouts)
    book.write(step=pb.StepEvent(step=batch + 1, metrics=values, ledger=after.to_proto()))


def _measure(book: Book, config: RunConfig, batch: int) -> tuple[dict[str, float], int]:
    """The metrics of the step, and how many rollouts it trained."""
    plan = CallPlan.of(config)
    (closed,) = book.journal.select("batch", step=batch + 1)
    first, last = plan.first_of(batch), plan.published_by(batch)
    passes = [_answer(book, seq_id).call.forward_backward for seq_id in range(first, last, 2)]
    stepped, published = _answer(book, last - 1), _answer(book, last)
    scored: list[metrics.Scored] = []
    losses: dict[str, metrics.Losses] = {}
    trained = set(closed.batch.groups)
    for record in book.journal.select("dispatched", step=batch + 1):
        number, env_id = record.dispatched.group, config.env[record.dispatched.environment].id
        attempts = book.attempts(number)
        good = [rollout for rollout in attempts if not rollout.HasField("failure")]
        lost = metrics.Losses(len(attempts) - len(good), _without_spread(book, number))
        losses[env_id] = losses.get(env_id, metrics.Losses()) + lost
        if number in trained:
            scored += [metrics.Scored(env_id, number, rollout) for rollout in good]
    before_ms = book.state.last_step_at_ms or _answer(book, plan.published_by(-1)).at_ms
    times = metrics.StepTimes(
        step_s=_seconds(published.at_ms - before_ms),
        wait_rollouts_s=_seconds(closed.at_ms - before_ms),
        train_s=_seconds(published.at_ms - closed.at_ms),
    )
    values = metrics.of_step(
        batch,
        scored,
        metrics.over_iterations(passes),
        stepped.call.optim_step,
        times,
        losses,
        config.versions_per_step,
    )
    return values, len(scored)


def _without_spread(book: Book, group: int) -> int:
    """1 for a group that was discarded for that, else 0."""
    discarded = book.journal.select("discarded", group=group)
    return sum(record.discarded.reason == NO_SPREAD for record in discarded)


def _answer(book: Book, seq_id: int) -> JournalRecord:
    (record,) = book.journal.select("call", group=seq_id)
    return record


def _seconds(ms: int) -> float:
    # A clock that was set back is no negative duration.
    return max(0, ms) / 1000
