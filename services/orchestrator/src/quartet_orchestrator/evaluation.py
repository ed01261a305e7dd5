"""Evaluations inside a run: when they are due, and what of them is written down.

1. Each rollout is written down before it counts; after a restart only what is missing is run.
2. What is missing in the end is told to a person, and training goes on; so is that one fell (stability.py).
3. The step after it is learned beside it, and published when it is written down (run.py): it is measured to
   its end, over stops and restarts, before another version takes the place of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quartet.run.config import RunConfig
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator.book import Book
from quartet_orchestrator.eval_metrics import Outcome, of_evaluation
from quartet_orchestrator.measuring import Measurement
from quartet_orchestrator.sampling import Sampling
from quartet_orchestrator.stability import compared, evaluation_fell


class Evaluation:
    """The evaluations that a run does by its own configuration."""

    def __init__(self, book: Book, config: RunConfig, sampling: Sampling) -> None:
        self._book = book
        self._config = config
        self._sampling = sampling

    def due(self, step: int) -> bool:
        """Whether the policy after so many steps is to be measured, and has not been."""
        is_due = self._config.eval.is_due(step, self._config.max_steps)
        return is_due and step not in self._book.state.evaluations

    async def measure(self, step: int) -> None:
        """Runs what is missing of the evaluation after so many steps, whose version has to be the published
        one, and writes the result."""
        config, book = self._config, self._book
        measurement = Measurement(
            book.state.run_id,
            f"eval-{step}",
            step * config.versions_per_step,
            config.eval.timeout_seconds,
        )

        def write(environment: int, event: pb.RolloutEvent) -> None:
            book.write(eval_rollout={"at_step": step, "environment": environment, "rollout": event})

        outcomes = await asyncio.to_thread(self._outcomes, step)
        if not await measurement.run(self._sampling, outcomes, write):
            limit_s = measurement.timeout_s
            book.note(f"the evaluation after {step} steps was ended at {limit_s:g} s", warning=True)
        self._tell(step, outcomes)
        metrics = await asyncio.to_thread(of_evaluation, outcomes, config.eval.pass_threshold)
        book.write(eval=pb.EvalEvent(step=step, policy_version=measurement.version, metrics=metrics))
        said = evaluation_fell(config, await asyncio.to_thread(self._compared))
        if said is not None:
            book.note(said, warning=True)

    def _compared(self) -> dict[int, dict[str, float]]:
        """What was measured, of the evaluations that say whether the last one fell."""
        steps, select = compared(self._book.state.evaluations), self._book.journal.select
        return {step: dict(record.eval.metrics) for step in steps for record in select("eval", step=step)}

    def _outcomes(self, step: int) -> list[Outcome]:
        """What became of the rollouts so far. Reads and parses all of them, which may be more than fit into
        memory, by example: meant for a thread."""
        infos = self._book.state.eval_environments
        outcomes = [Outcome.of(trial, info) for trial, info in zip(self._config.trials, infos, strict=True)]
        for place in range(sum(outcome.examples for outcome in outcomes)):
            for record in self._book.journal.select("eval_rollout", group=place, step=step):
                event = record.eval_rollout.rollout
                outcomes[record.eval_rollout.environment].ended(event.task_index, event.rollout)
        return outcomes

    def _tell(self, step: int, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            lost = outcome.losses()
            if lost:
                reasons = ", ".join(f"{count} {why}" for why, count in sorted(lost.items()))
                self._book.note(
                    f"the evaluation after {step} steps has {len(outcome.good)} of {outcome.asked} rollouts "
                    f"of {outcome.trial.name!r}: {reasons}",
                    warning=True,
                )
