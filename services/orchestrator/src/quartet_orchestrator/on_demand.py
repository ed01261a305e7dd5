"""Evaluations on demand: what a run's policy earns now, for somebody who asks.

1. One version is measured, the one published last: the run publishes no other meanwhile (hold.py). It waits
   for what is measured, and not for who reads of it.
2. Nothing of it is written down. Who leaves ends it; so does the end of the run, with its reason.
3. What is asked for is bounded: MAX_AT_ONCE evaluations of a run, MAX_ROLLOUTS and `max_concurrent` rollouts
   of each, UNREAD_BYTES that the caller has not taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quartet.errors import QuartetError
from quartet.run.config import RunConfig
from quartet.run.evaluation import EvaluateConfig
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator import admission
from quartet_orchestrator.book import Book
from quartet_orchestrator.envhosts import EnvHosts
from quartet_orchestrator.eval_metrics import Outcome, of_evaluation
from quartet_orchestrator.hold import Hold
from quartet_orchestrator.measuring import Measurement
from quartet_orchestrator.outage import RunInterrupted
from quartet_orchestrator.permits import Permits
from quartet_orchestrator.sampling import Sampling
from quartet_orchestrator.together import alongside, first_cause

# The run publishes nothing meanwhile; more are not a measurement but a load.
MAX_AT_ONCE = 4
# Each leaves two numbers in memory and one event on the wire; whole test sets have fewer.
MAX_ROLLOUTS = 100_000
# A reader that is this far behind does not read; a rollout has at most 4 MiB.
UNREAD_BYTES = 64 << 20


class _Behind(Exception):
    """The caller left too much unread. No QuartetError: sampling tries those again."""


@dataclass
class Measurable:
    """What measuring a run's policy needs of the run."""

    book: Book
    config: RunConfig
    hosts: EnvHosts
    hold: Hold
    sampling: Callable[[Permits], Sampling]
    under_way: int = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of MAX_AT_ONCE. Raises OVERLOADED."""
        if self.under_way >= MAX_AT_ONCE:
            raise QuartetError(
                "OVERLOADED",
                f"{MAX_AT_ONCE} evaluations of run {self.book.state.run_id!r} are under way; ask again later",
            )
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1


class EvaluationOnDemand:
    """One evaluation that somebody asked for. It begins when `responses` is read."""

    def __init__(self, subject: Measurable, config: EvaluateConfig) -> None:
        self._subject = subject
        self._config = config
        self._outcomes: list[Outcome] = []
        # Bounded by `_unread_bytes`.
        self._unread: asyncio.Queue[pb.RolloutEvent | None] = asyncio.Queue()
        self._unread_bytes = 0

    @property
    def lacking(self) -> int:
        """Rollouts without a result."""
        return sum(outcome.asked - len(outcome.good) for outcome in self._outcomes)

    async def responses(self) -> AsyncGenerator[pb.EvaluateResponse, None]:
        """Each attempt as it ends, then the result. Raises QuartetError."""
        with self._subject.place():
            run = self._subject.config
            trials = self._config.trials(run.env, run.sampling)
            infos = await admission.describe_trials(trials, self._subject.hosts)
            outcomes = [Outcome.of(trial, info) for trial, info in zip(trials, infos, strict=True)]
            _check_size(outcomes)
            self._outcomes = outcomes
            work = asyncio.create_task(self._measure())
            work.add_done_callback(lambda _: self._unread.put_nowait(None))
            try:
                while (event := await self._unread.get()) is not None:
                    self._unread_bytes -= event.ByteSize()
                    yield pb.EvaluateResponse(rollout=event)
                yield pb.EvaluateResponse(result=await work)
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    async def _measure(self) -> pb.EvalEvent:
        async with self._subject.hold.held():
            step, measurement = self._subject.book.state.step, self._measurement()
            sampling = self._subject.sampling(Permits(self._config.max_concurrent))
            try:
                await alongside(
                    measurement.run(sampling, self._outcomes, self._ended), self._subject.hold.ended()
                )
            except Exception as raised:
                raise _typed(first_cause(raised)) from raised
        metrics = await asyncio.to_thread(of_evaluation, self._outcomes, self._config.pass_threshold)
        return pb.EvalEvent(step=step, policy_version=measurement.version, metrics=metrics)

    def _measurement(self) -> Measurement:
        run, state = self._subject.config, self._subject.book.state
        return Measurement(
            state.run_id,
            "evaluate",
            state.step * run.versions_per_step,
            self._config.timeout_seconds,
        )

    def _ended(self, _: int, event: pb.RolloutEvent) -> None:
        # The run may stand still for it, and does move.
        self._subject.book.moved()
        self._unread_bytes += event.ByteSize()
        if self._unread_bytes > UNREAD_BYTES:
            raise _Behind
        self._unread.put_nowait(event)


def _check_size(outcomes: list[Outcome]) -> None:
    asked = sum(outcome.asked for outcome in outcomes)
    if asked > MAX_ROLLOUTS:
        largest = max(outcomes, key=lambda outcome: outcome.asked)
        trial, others = largest.trial, len(outcomes) - 1
        each = (
            f"{largest.examples} examples of {trial.name!r} with {trial.rollouts_per_example} rollouts each"
        )
        every = f"{each}, and those of {others} more," if others else each
        remedy = f"ask for at most {MAX_ROLLOUTS} at once"
        raise admission.refusal("num_examples", trial.num_examples, f"{every} are {asked} rollouts; {remedy}")


def _typed(cause: BaseException) -> BaseException:
    """As the caller is told."""
    match cause:
        case _Behind():
            return QuartetError(
                "OVERLOADED",
                f"{UNREAD_BYTES >> 20} MiB of rollouts were left unread; read faster, or ask for fewer",
            )
        case RunInterrupted(__cause__=QuartetError() as error):
            return error
        case RunInterrupted():
            return QuartetError("NOT_READY", str(cause))
    return cause
