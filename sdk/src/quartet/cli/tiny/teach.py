"""Supervised training through the trainer service, measured by sampling through the inference service.

1. A `Lesson` is one run of the trainer: its calls are numbered 1, 2, 3, ... and each is awaited before the
   next.
2. `measure` samples from exactly the weights of the last step: it publishes them and waits until the
   replica serves them.
3. Equal seeds give equal demonstrations, equal measured prompts and equal sampling seeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.cli.tiny.demos import MAX_TOKENS, Example, Reversals, reward
from quartet.cli.tiny.files import IM_END, render
from quartet.errors import QuartetError
from quartet.kit.call import RetryBudget, stream, unary
from quartet.v1.common_pb2 import Message, SamplingParams
from quartet.v1.inference_service_pb2 import (
    FINISH_REASON_STOP,
    GenerateRequest,
    GetModelRequest,
    MessagesPrompt,
)
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub
from quartet.v1.rollout_pb2 import PolicySpan, Sample
from quartet.v1.trainer_service_pb2 import (
    LOSS_KIND_CROSS_ENTROPY,
    CreateRunRequest,
    ForwardBackwardRequest,
    ForwardBackwardStart,
    LossSpec,
    OptimizerSpec,
    OptimStepRequest,
    PublishWeightsRequest,
    RunSpec,
    SampleBatch,
    SaveStateRequest,
    StreamCommit,
    TrainingSample,
)
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub

BATCH = 64
CALL_SECONDS = 120.0
START_SECONDS = 180.0  # the first call waits for the service to import torch
SERVE_SECONDS = 60.0
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Services:
    """The two services that make a model."""

    trainer: TrainerServiceStub
    inference: InferenceServiceStub


def training_sample(tokenizer: Any, example: Example, answer: str) -> TrainingSample:
    """A demonstration: the loss covers the answer and its end token."""
    prompt = tokenizer.encode(render(example.messages), add_special_tokens=False).ids
    completion = tokenizer.encode(answer + IM_END, add_special_tokens=False).ids
    covered = PolicySpan(start=len(prompt), length=len(completion))
    return TrainingSample(sample=Sample(token_ids=prompt + completion, spans=[covered]))


class Lesson:
    """One run of the trainer on demonstrations."""

    def __init__(self, services: Services, tokenizer: Any, run_id: str, demos: Reversals) -> None:
        """Prepare; nothing is called yet."""
        self.steps = 0
        self._services = services
        self._tokenizer = tokenizer
        self._run_id = run_id
        self._demos = demos
        self._seq = 0

    async def begin(self, model: Path, optimizer: OptimizerSpec, seed: int, *, from_scratch: bool) -> None:
        """Create the run."""
        spec = RunSpec(base_model=str(model), optimizer=optimizer, seed=seed, from_scratch=from_scratch)
        await unary(
            self._services.trainer.CreateRun,
            CreateRunRequest(run_id=self._run_id, spec=spec),
            timeout_s=START_SECONDS,
            budget=RetryBudget(),
            wait_for_ready=True,
        )

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    async def step(self) -> float:
        """One optimizer step. Its loss per token."""
        demos = [self._demos.demonstration() for _ in range(BATCH)]
        samples = [training_sample(self._tokenizer, example, answer) for example, answer in demos]
        covered = sum(one.sample.spans[0].length for one in samples)
        start = ForwardBackwardStart(
            run_id=self._run_id,
            seq_id=self._next(),
            loss=LossSpec(kind=LOSS_KIND_CROSS_ENTROPY),
            normalizer=covered,
        )
        tokens = sum(len(one.sample.token_ids) for one in samples)
        frames = [
            ForwardBackwardRequest(start=start),
            ForwardBackwardRequest(batch=SampleBatch(samples=samples)),
            ForwardBackwardRequest(commit=StreamCommit(sample_count=len(samples), token_count=tokens)),
        ]
        done = await unary(self._services.trainer.ForwardBackward, frames, timeout_s=CALL_SECONDS)
        step = OptimStepRequest(run_id=self._run_id, seq_id=self._next())
        await unary(self._services.trainer.OptimStep, step, timeout_s=CALL_SECONDS)
        self.steps += 1
        return float(done.loss)

    async def measure(self, prompts: Reversals, count: int, seed: int) -> float:
        """Mean reward of so many samples from the current weights."""
        publish = PublishWeightsRequest(run_id=self._run_id, seq_id=self._next())
        published = await unary(self._services.trainer.PublishWeights, publish, timeout_s=CALL_SECONDS)
        await self._served(published.version)
        examples = [prompts.example() for _ in range(count)]
        rewards = await asyncio.gather(
            *(self._reward(example, published.version, seed + i) for i, example in enumerate(examples))
        )
        return sum(rewards) / count

    async def _served(self, version: int) -> None:
        """Until the replica serves this run's version."""
        async with asyncio.timeout(SERVE_SECONDS):
            while True:
                model = await unary(
                    self._services.inference.GetModel,
                    GetModelRequest(),
                    timeout_s=SERVE_SECONDS,
                    wait_for_ready=True,
                )
                if model.run_id == self._run_id and model.policy_version >= version:
                    return
                await asyncio.sleep(POLL_SECONDS)

    async def _reward(self, example: Example, version: int, seed: int) -> float:
        text, ended = await generate(
            self._services.inference, self._run_id, example.messages, version=version, seed=seed
        )
        return reward(example.text, text, ended)

    async def export(self, name: str) -> Path:
        """Save the model. Its Hugging Face folder on the trainer."""
        save = SaveStateRequest(run_id=self._run_id, seq_id=self._next(), name=name, export_model=True)
        saved = await unary(self._services.trainer.SaveState, save, timeout_s=CALL_SECONDS)
        return Path(saved.state.model_path)


async def generate(
    stub: InferenceServiceStub, run_id: str, messages: Sequence[dict[str, str]], *, version: int, seed: int
) -> tuple[str, bool]:
    """One completion at temperature 1, and whether it ended by itself."""
    request = GenerateRequest(
        run_id=run_id,
        messages=MessagesPrompt(
            messages=[Message(role=one["role"], content=one["content"]) for one in messages]
        ),
        sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed),
        min_policy_version=version,
    )
    async for frame in stream(stub.Generate(request, timeout=CALL_SECONDS), idle_timeout_s=CALL_SECONDS):
        if frame.HasField("finish"):
            return frame.finish.message.content, frame.finish.finish_reason == FINISH_REASON_STOP
    raise QuartetError("STREAM_TORN", "the completion ended without its finish")
