"""Evaluation: what exactly one policy version earns on the evaluation examples.

1. Every rollout that counts was sampled by the pinned version (`exact_policy_version`) and by no other; one
   with a token of another version is a failure (sampling.py).
2. Each rollout is written down before it counts; after a restart only what is missing is run.
3. A rollout that failed for good is left out and counted in "eval/coverage"; it never counts as reward 0.
4. An evaluation ends by `eval.timeout_seconds`, whatever its environments do: what is not there by then is
   missing, a person is told, and training goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from quartet.run.config import RunConfig
from quartet.run.evaluation import EvalTrial
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb

from quartet_orchestrator.book import Book
from quartet_orchestrator.eval_metrics import Outcome, of_evaluation
from quartet_orchestrator.requests import rollouts_request
from quartet_orchestrator.sampling import Sampling


@dataclass(frozen=True)
class _Example:
    """One example to measure; `place` numbers it within the evaluation."""

    place: int
    environment: int
    trial: EvalTrial
    task_index: int


class Evaluation:
    def __init__(self, book: Book, config: RunConfig, sampling: Sampling) -> None:
        self._book = book
        self._config = config
        self._sampling = sampling

    def due(self, step: int) -> bool:
        """Whether the policy after so many steps is to be measured, and has not been."""
        config, last = self._config.eval, self._config.max_steps
        wanted = (
            (step == 0 and config.before)
            or (step == last and config.after)
            or (0 < step < last and config.interval > 0 and step % config.interval == 0)
        )
        return wanted and config.num_examples > 0 and step not in self._book.state.evaluations

    async def measure(self, step: int) -> None:
        """Runs what is missing of the evaluation after so many steps, whose version has to be the published
        one, and writes the result."""
        before = await asyncio.to_thread(self._outcomes, step)
        try:
            async with asyncio.timeout(self._config.eval.timeout_seconds), asyncio.TaskGroup() as group:
                for example in self._examples():
                    members = range(example.trial.rollouts_per_example)
                    good = before[example.environment].good
                    missing = {member for member in members if (example.task_index, member) not in good}
                    if missing:
                        group.create_task(self._measure(step, example, missing))
        except TimeoutError:
            limit_s = self._config.eval.timeout_seconds
            self._book.note(f"the evaluation after {step} steps was ended at {limit_s:g} s", warning=True)
        outcomes = await asyncio.to_thread(self._outcomes, step)
        self._tell(step, outcomes)
        self._book.write(
            eval=pb.EvalEvent(
                step=step,
                policy_version=self._version(step),
                metrics=of_evaluation(outcomes, self._config.eval.pass_threshold),
            )
        )

    def _version(self, step: int) -> int:
        return step * self._config.versions_per_step

    def _sizes(self) -> list[tuple[EvalTrial, int]]:
        """Each environment of the evaluation, and how many of its examples are evaluated."""
        trials, infos = self._config.trials, self._book.state.eval_environments
        return [
            (trial, min(trial.num_examples, info.eval_size))
            for trial, info in zip(trials, infos, strict=True)
        ]

    def _examples(self) -> Iterator[_Example]:
        place = 0
        for environment, (trial, size) in enumerate(self._sizes()):
            for task_index in range(size):
                yield _Example(place, environment, trial, task_index)
                place += 1

    async def _measure(self, step: int, example: _Example, members: set[int]) -> None:
        request = rollouts_request(
            self._book.state.run_id,
            self._config,
            f"eval-{step}-{example.place}",
            example.trial.hosted,
            epb.SPLIT_EVAL,
            example.task_index,
        )
        request.min_policy_version = request.exact_policy_version = self._version(step)
        if self._config.eval.temperature is not None:
            request.sampling.temperature = self._config.eval.temperature

        def ended(rollout: rpb.Rollout) -> bool:
            self._book.write(
                eval_rollout={
                    "at_step": step,
                    "environment": example.environment,
                    "rollout": pb.RolloutEvent(
                        group=example.place,
                        env_id=example.trial.hosted.id,
                        task_index=example.task_index,
                        rollout=rollout,
                    ),
                }
            )
            return True

        await self._sampling.complete(request, members, ended, all_or_nothing=False)

    def _outcomes(self, step: int) -> list[Outcome]:
        """What became of the rollouts so far. Reads and parses all of them: meant for a thread."""
        outcomes = [Outcome(trial, size) for trial, size in self._sizes()]
        for record in self._book.journal.select("eval_rollout", step=step):
            event = record.eval_rollout.rollout
            outcomes[record.eval_rollout.environment].ended(event.task_index, event.rollout)
        return outcomes

    def _tell(self, step: int, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            lost = outcome.losses()
            if lost:
                reasons = ", ".join(f"{count} {why}" for why, count in sorted(lost.items()))
                self._book.note(
                    f"the evaluation after {step} steps has {len(outcome.good)} of {outcome.asked} rollouts "
                    f"of {outcome.trial.name!r}: {reasons}",
                    warning=True,
                )
