"""Measuring: what exactly one policy version earns on the evaluation examples of some environments.

1. Every rollout that counts was sampled by the pinned version (`exact_policy_version`) and by no other; one
   with a token of another version is a failure (sampling.py).
2. A rollout that failed for good is left out and counted in "eval/coverage"; it never counts as reward 0.
3. It ends by `timeout_s`, whatever its environments do: what is not there by then is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quartet.kit import tracing
from quartet.run.evaluation import EvalTrial
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb

from quartet_orchestrator.eval_metrics import Outcome
from quartet_orchestrator.requests import rollouts_request
from quartet_orchestrator.sampling import Sampling

#: Told of every attempt: the index of its environment, and what ended.
Ended = Callable[[int, pb.RolloutEvent], None]


@dataclass(frozen=True)
class _Example:
    """One example to measure; `place` numbers it within the evaluation."""

    place: int
    environment: int
    trial: EvalTrial
    task_index: int


@dataclass(frozen=True)
class Measurement:
    """Which version of a run is measured, and for how long at most."""

    run_id: str
    #: Of its requests.
    name: str
    version: int
    timeout_s: float

    async def run(self, sampling: Sampling, outcomes: Sequence[Outcome], ended: Ended) -> bool:
        """Runs what the outcomes lack and adds to them; returns whether it was done in time."""
        try:
            async with asyncio.timeout(self.timeout_s), asyncio.TaskGroup() as group:
                for example in _examples(outcomes):
                    outcome = outcomes[example.environment]
                    missing = outcome.missing(example.task_index)
                    if missing:
                        group.create_task(self._measure(sampling, example, missing, outcome, ended))
        except TimeoutError:
            return False
        return True

    async def _measure(
        self, sampling: Sampling, example: _Example, members: list[int], outcome: Outcome, ended: Ended
    ) -> None:
        request = rollouts_request(
            self.run_id,
            example.trial.sampling,
            f"{self.name}-{example.place}",
            example.trial.hosted,
            epb.SPLIT_EVAL,
            example.task_index,
        )
        request.min_policy_version = request.exact_policy_version = self.version

        def attempt(rollout: rpb.Rollout) -> bool:
            event = pb.RolloutEvent(
                group=example.place,
                env_id=example.trial.name,
                task_index=example.task_index,
                rollout=rollout,
            )
            ended(example.environment, event)
            outcome.ended(example.task_index, rollout)
            return True

        with tracing.span(
            "evaluated example",
            root=True,
            run_id=self.run_id,
            evaluation=self.name,
            policy_version=self.version,
            env=example.trial.name,
            task_index=example.task_index,
        ):
            await sampling.complete(request, members, attempt, all_or_nothing=False, whole=outcome.compares)


def _examples(outcomes: Sequence[Outcome]) -> Iterator[_Example]:
    place = 0
    for environment, outcome in enumerate(outcomes):
        for task_index in range(outcome.examples):
            yield _Example(place, environment, outcome.trial, task_index)
            place += 1
