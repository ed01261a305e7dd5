"""A loop of reinforcement learning of one's own: rollouts, advantages, a step, weights, on a page.

python examples/rl_loop/train.py [--model models/tiny] [--environment reverse-text] [--max-tokens 13]

Trainer, inference and environment host do the work, and no orchestrator runs: what is sampled when, and what
an answer is worth, is decided here. In a cell of a notebook: `from train import train; await train("mine")`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from statistics import fmean

from quartet.errors import QuartetError
from quartet.kit.call import stream, unary
from quartet.kit.channel import connect
from quartet.v1 import envhost_service_pb2 as e
from quartet.v1 import trainer_service_pb2 as t
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceStub
from quartet.v1.rollout_pb2 import Rollout
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub

TASKS, MEMBERS = 8, 8
# The trainer loads the model in the first call, the host the environment in its first.
LOADING_SECONDS, SECONDS = 300.0, 120.0


def advantages(rewards: Sequence[float]) -> list[float]:
    """Of a group: yours to change."""
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def request_of(run_id: str, version: int, environment: str, task: int, tokens: int) -> e.RunRolloutsRequest:
    """A group of rollouts of one task, by this version of the policy: they wait until inference serves it."""
    return e.RunRolloutsRequest(
        run_id=run_id,
        request_id=f"{run_id} {version} {task}",
        environment={"id": environment},
        task_index=task,
        members=range(MEMBERS),
        # As the loss has it. Left out, it is what the environment says, and no sample tells that.
        sampling={"max_tokens": tokens, "temperature": 1.0},
        min_policy_version=version,
        timeout_ms=60_000,
    )


def samples_of(group: Sequence[Rollout]) -> list[t.TrainingSample]:
    """What is learned from a group; of a rollout of several samples each has its advantage."""
    found = advantages([one.reward for one in group]) if group else []
    return [
        t.TrainingSample(sample=sample, advantages=[advantage])
        for rollout, advantage in zip(group, found, strict=True)
        for sample in rollout.samples
    ]


async def group_of(host: EnvHostServiceStub, request: e.RunRolloutsRequest) -> list[Rollout]:
    """The rollouts of one task that have a reward; a failure is none."""
    answers = stream(host.RunRollouts(request, wait_for_ready=True), idle_timeout_s=15)
    ended = [answer.rollout async for answer in answers if answer.HasField("rollout")]
    for rollout in ended:
        if rollout.HasField("failure"):
            print(f"task {request.task_index} failed: {rollout.failure.message}")
    return [rollout for rollout in ended if not rollout.HasField("failure")]


async def batch_of(
    start: t.ForwardBackwardStart, samples: Sequence[t.TrainingSample]
) -> AsyncIterator[t.ForwardBackwardRequest]:
    """A batch as the trainer takes it: nothing of it counts without the last message."""
    yield t.ForwardBackwardRequest(start=start)
    for at in range(0, len(samples), 64):  # of 4 MiB at most each
        yield t.ForwardBackwardRequest(batch=t.SampleBatch(samples=samples[at : at + 64]))
    tokens = sum(len(one.sample.token_ids) for one in samples)
    yield t.ForwardBackwardRequest(commit=t.StreamCommit(sample_count=len(samples), token_count=tokens))


async def train(
    run_id: str,
    *,
    model: str = "models/tiny",
    environment: str = "reverse-text",
    steps: int = 20,
    learning_rate: float = 5e-4,
    max_tokens: int = 13,
    trainer_address: str = "127.0.0.1:50052",
    envhost_address: str = "127.0.0.1:50054",
) -> str:
    """Train, and return the folder of the model."""
    async with connect(trainer_address) as to_trainer, connect(envhost_address) as to_host:
        trainer, host = TrainerServiceStub(to_trainer), EnvHostServiceStub(to_host)
        optimizer = t.OptimizerSpec(learning_rate=learning_rate, max_grad_norm=1.0)
        spec = t.RunSpec(base_model=model, optimizer=optimizer)
        create = t.CreateRunRequest(run_id=run_id, spec=spec)
        seq_id = 0

        def numbered() -> dict[str, str | int]:
            nonlocal seq_id
            seq_id += 1
            return {"run_id": run_id, "seq_id": seq_id}

        async def published() -> int:
            request = t.PublishWeightsRequest(**numbered())
            return (await unary(trainer.PublishWeights, request, timeout_s=SECONDS)).version

        listed = e.ListEnvironmentsRequest()  # RunRollouts waits for a host less long
        await unary(host.ListEnvironments, listed, timeout_s=LOADING_SECONDS, wait_for_ready=True)
        while True:
            created = await unary(trainer.CreateRun, create, timeout_s=LOADING_SECONDS, wait_for_ready=True)
            # Calls are numbered: one that comes again is not applied again.
            seq_id = created.run.applied_seq_id
            try:
                version = await published()
                break
            except QuartetError as error:
                # The call of a cell that was interrupted: it is applied all the same, and has its number.
                if error.reason != "SEQUENCE_CONFLICT":
                    raise
                print(f"waiting: {error.message}", flush=True)
                await asyncio.sleep(1)
        for step in range(steps):
            asked = [
                request_of(run_id, version, environment, step * TASKS + place, max_tokens)
                for place in range(TASKS)
            ]
            groups = await asyncio.gather(*(group_of(host, request) for request in asked))
            samples = [sample for group in groups for sample in samples_of(group)]
            if not samples:
                raise SystemExit(f"step {step + 1}: every rollout failed")
            start = t.ForwardBackwardStart(
                **numbered(),
                loss={"kind": t.LOSS_KIND_POLICY_GRADIENT, "ratio": t.RATIO_TREATMENT_CISPO},
                normalizer=sum(len(one.sample.logprobs) for one in samples),
            )
            learned = await unary(trainer.ForwardBackward, batch_of(start, samples), timeout_s=SECONDS)
            await unary(trainer.OptimStep, t.OptimStepRequest(**numbered()), timeout_s=SECONDS)
            version = await published()
            reward = fmean(one.reward for group in groups for one in group)
            print(f"step {step + 1}  reward {reward:.3f}  loss {learned.loss:.4f}", flush=True)
        save = t.SaveStateRequest(**numbered(), name="last", export_model=True)
        saved = await unary(trainer.SaveState, save, timeout_s=LOADING_SECONDS)
        await unary(trainer.CloseRun, t.CloseRunRequest(run_id=run_id), timeout_s=SECONDS)
        return saved.state.model_path


def main() -> None:
    """Train by the command's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="mine")
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--environment", default="reverse-text")
    parser.add_argument("--max-tokens", type=int, default=13)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trainer", default="127.0.0.1:50052")
    parser.add_argument("--envhost", default="127.0.0.1:50054")
    given = parser.parse_args()
    # Both are waited for, so that they may be started in any order.
    print(f"trainer at {given.trainer}, environment host at {given.envhost}", flush=True)
    folder = asyncio.run(
        train(
            given.run,
            model=given.model,
            environment=given.environment,
            steps=given.steps,
            max_tokens=given.max_tokens,
            trainer_address=given.trainer,
            envhost_address=given.envhost,
        )
    )
    print(f"model {folder}")


if __name__ == "__main__":
    main()
