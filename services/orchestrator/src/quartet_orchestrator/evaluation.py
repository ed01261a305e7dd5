"""Evaluation: the mean reward of exactly one policy version on the evaluation examples.

1. Every rollout is sampled by the pinned version (`exact_policy_version`); one with a token of another
   version is an error.
2. Each rollout is written down before it counts; after a restart only what is missing is run.
3. A rollout that failed for good is left out and counted in "eval/coverage"; it never counts as reward 0.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from quartet.run.config import RunConfig
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb

from quartet_orchestrator import metrics
from quartet_orchestrator.book import Book
from quartet_orchestrator.outage import RunFailed
from quartet_orchestrator.requests import rollouts_request
from quartet_orchestrator.sampling import Sampling


@dataclass(frozen=True)
class _Example:
    """One example to measure; `place` numbers it within the evaluation."""

    place: int
    environment: int
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
        done: dict[int, set[int]] = defaultdict(set)
        for event in await asyncio.to_thread(self._good, step):
            done[event.group].add(event.rollout.member)
        examples = list(self._examples())
        members = set(range(self._config.eval.rollouts_per_example))
        async with asyncio.TaskGroup() as group:
            for example in examples:
                if missing := members - done[example.place]:
                    group.create_task(self._measure(step, example, missing))
        asked = len(examples) * len(members)
        values = await asyncio.to_thread(self._values, step, asked)
        self._book.write(
            eval=pb.EvalEvent(
                step=step,
                policy_version=step * self._config.versions_per_step,
                metrics=values,
            )
        )

    def _examples(self) -> Iterator[_Example]:
        place = 0
        for environment, info in enumerate(self._book.state.environments):
            for task_index in range(min(self._config.eval.num_examples, info.eval_size)):
                yield _Example(place, environment, task_index)
                place += 1

    async def _measure(self, step: int, example: _Example, members: set[int]) -> None:
        env = self._config.env[example.environment]
        request = rollouts_request(
            self._book.state.run_id,
            self._config,
            f"eval-{step}-{example.place}",
            env,
            epb.SPLIT_EVAL,
            example.task_index,
        )
        request.min_policy_version = request.exact_policy_version = step * self._config.versions_per_step
        if self._config.eval.temperature is not None:
            request.sampling.temperature = self._config.eval.temperature

        def ended(rollout: rpb.Rollout) -> bool:
            self._ended(step, example, env.id, rollout)
            return True

        await self._sampling.complete(request, members, ended, all_or_nothing=False)

    def _ended(self, step: int, example: _Example, env_id: str, rollout: rpb.Rollout) -> None:
        versions = {span.policy_version for sample in rollout.samples for span in sample.spans}
        wanted = step * self._config.versions_per_step
        if not rollout.HasField("failure") and versions != {wanted}:
            raise RunFailed(f"an evaluation of version {wanted} was sampled by versions {sorted(versions)}")
        self._book.write(
            eval_rollout={
                "at_step": step,
                "environment": example.environment,
                "rollout": pb.RolloutEvent(
                    group=example.place, env_id=env_id, task_index=example.task_index, rollout=rollout
                ),
            }
        )

    def _good(self, step: int) -> list[pb.RolloutEvent]:
        """The rollouts that succeeded so far. Reads and parses all of them: meant for a thread."""
        records = self._book.journal.select("eval_rollout", step=step)
        events = (record.eval_rollout.rollout for record in records)
        return [event for event in events if not event.rollout.HasField("failure")]

    def _values(self, step: int, asked: int) -> dict[str, float]:
        scored = [metrics.Scored(event.env_id, event.rollout) for event in self._good(step)]
        if not scored:
            raise RunFailed(
                f"all {asked} rollouts of the evaluation after {step} steps failed; see their failures"
            )
        return metrics.of_evaluation(scored, asked)
