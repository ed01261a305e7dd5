"""An environment that a Quartet host runs, as TRL wants one: a dataset, a `rollout_func`, a reward function.

1. The trainer's own model samples every turn, and only it. What TRL trains on are the tokens that it sampled,
   in the order in which the environment asked for them; what the environment said between them is masked
   (`env_mask`).
2. The environment, and nothing here, makes the prompt and the reward.
3. A failure is not a reward: its reward is None, which TRL leaves out of the group's baseline and the loss.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from datasets import Dataset
from policy import TrainersModel
from quartet.interact import interact
from quartet.kit.channel import connect
from quartet.v1 import envhost_service_pb2 as pb
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceStub
from quartet.v1.rollout_pb2 import FailureKind, Rollout

TASKS_PER_CALL = 4096  # the host's bound
UNARY_SECONDS = 300.0  # the first call loads the environment
RETRIES = 2  # of a rollout whose worker died


@dataclass(frozen=True)
class HostedEnvironment:
    """One environment on one host."""

    host: str
    id: str
    args_json: str = ""
    rollout_seconds: float = 120.0

    def tasks(self, count: int) -> Dataset:
        """The first `count` training tasks, by number: their text stays with the environment."""

        async def ask() -> int:
            async with connect(self.host) as channel:
                request = pb.GetTasksRequest(environment=self._ref, count=min(count, TASKS_PER_CALL))
                return len((await EnvHostServiceStub(channel).GetTasks(request, timeout=UNARY_SECONDS)).tasks)

        return Dataset.from_list([{"prompt": str(index)} for index in range(asyncio.run(ask()))])

    def rollouts(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: a finished rollout for each prompt, in their order."""
        finished = asyncio.run(self._run([int(prompt) for prompt in prompts], trainer))
        failures = [rollout.failure for rollout in finished if rollout.HasField("failure")]
        if len(failures) == len(finished):
            first = failures[0]
            raise RuntimeError(
                f"every rollout failed; the first as {FailureKind.Name(first.kind)}: {first.message}"
            )
        columns = [sequence(rollout, trainer.processing_class.pad_token_id) for rollout in finished]
        return {name: [column[name] for column in columns] for name in columns[0]}

    async def _run(self, tasks: list[int], trainer: Any) -> list[Rollout]:
        policy = TrainersModel(trainer)

        async def group(stub: EnvHostServiceStub, task: int, members: int) -> list[Rollout]:
            run = pb.RunRolloutsRequest(
                run_id="trl",
                request_id=uuid.uuid4().hex,
                environment=self._ref,
                task_index=task,
                members=range(members),
                sampling=policy.sampling,
                timeout_ms=round(self.rollout_seconds * 1000),
                max_retries=RETRIES,
            )
            rollouts = [rollout async for rollout in interact(stub, run, policy)]
            return sorted(rollouts, key=lambda rollout: rollout.member)

        async with connect(self.host) as channel, policy:
            stub = EnvHostServiceStub(channel)
            # TRL repeats a prompt for each member of its group.
            sizes = [(task, len(list(same))) for task, same in groupby(tasks)]
            groups = await asyncio.gather(*(group(stub, task, members) for task, members in sizes))
        return [rollout for rollouts in groups for rollout in rollouts]

    @property
    def _ref(self) -> pb.EnvironmentRef:
        return pb.EnvironmentRef(id=self.id, args_json=self.args_json)


def sequence(rollout: Rollout, pad: int) -> dict[str, Any]:
    """A rollout in the columns that TRL trains on."""
    if rollout.HasField("failure"):
        # TRL wants at least one token of everything; this one is masked, and without a reward.
        return {
            "prompt_ids": [pad],
            "completion_ids": [pad],
            "logprobs": [0.0],
            "env_mask": [0],
            "reward": None,
        }
    if len(rollout.samples) != 1:
        raise RuntimeError(
            f"a rollout has {len(rollout.samples)} branches, and TRL trains on one sequence of each"
        )
    (sample,) = rollout.samples
    start, end = sample.spans[0].start, sample.spans[-1].start + sample.spans[-1].length
    mask, logprobs = [0] * (end - start), [0.0] * (end - start)
    of_sampled = iter(sample.logprobs)
    for span in sample.spans:
        for position in range(span.start - start, span.start - start + span.length):
            mask[position], logprobs[position] = 1, next(of_sampled)
    return {
        "prompt_ids": list(sample.token_ids[:start]),
        "completion_ids": list(sample.token_ids[start:end]),
        "logprobs": logprobs,
        "env_mask": mask,
        "reward": rollout.reward,
    }


def environment_reward(reward: list[float | None], log_metric: Any, **_: Any) -> list[float | None]:
    """TRL's reward function: hands on what the environment said."""
    log_metric("rollouts/failed", sum(one is None for one in reward) / len(reward))
    return reward
