"""Supervised training through the trainer service, measured by sampling through the inference service.

1. A `Lesson` is one run of the trainer: its calls are numbered 1, 2, 3, ... and each is awaited before the
   next.
2. `measure` samples from exactly the weights of the last step: it publishes them and waits until the
   replica serves them.
3. Equal seeds give equal demonstrations, equal measured prompts and equal sampling seeds.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.cli.tiny.courses import CALL_SECONDS, Conversation, Course, Policy
from quartet.cli.tiny.files import IM_END, content_of, render
from quartet.errors import QuartetError
from quartet.kit.call import RetryBudget, unary
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceStub
from quartet.v1.inference_service_pb2 import GetModelRequest
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
START_SECONDS = 180.0  # the first call waits for the service to import torch
SERVE_SECONDS = 60.0
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Services:
    """The services that make a model."""

    trainer: TrainerServiceStub
    inference: InferenceServiceStub
    # For courses that an environment measures.
    envhost: EnvHostServiceStub | None = None


def training_sample(tokenizer: Any, conversation: Conversation) -> TrainingSample:
    """A demonstration: the loss covers the assistant's turns with their end tokens."""
    tokens: list[int] = []
    spans: list[PolicySpan] = []
    told = 0
    for number, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        # What a sampled turn lacks of the template's text is the line's end; it opens the next part.
        opening = ("\n" if tokens else "") + render(conversation[told:number])
        tokens += tokenizer.encode(opening, add_special_tokens=False).ids
        said = tokenizer.encode(content_of(message) + IM_END, add_special_tokens=False).ids
        spans.append(PolicySpan(start=len(tokens), length=len(said)))
        tokens += said
        told = number + 1
    return TrainingSample(sample=Sample(token_ids=tokens, spans=spans))


class Lesson:
    """One run of the trainer on demonstrations."""

    def __init__(
        self,
        services: Services,
        tokenizer: Any,
        run_id: str,
        course: Course,
        stream: tuple[int, float] = (0, 0.0),
    ) -> None:
        """Prepare; nothing is called yet. `stream` is of demonstrations: its seed and share of bad habits."""
        self.steps = 0
        self._services = services
        self._tokenizer = tokenizer
        self._run_id = run_id
        self._course = course
        self._stream = stream
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
        demos = self._course.conversations(*self._stream, BATCH)
        samples = [training_sample(self._tokenizer, conversation) for conversation in demos]
        covered = sum(span.length for one in samples for span in one.sample.spans)
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

    async def measure(self, count: int, seed: int) -> float:
        """Mean reward of so many rollouts by the current weights."""
        publish = PublishWeightsRequest(run_id=self._run_id, seq_id=self._next())
        published = await unary(self._services.trainer.PublishWeights, publish, timeout_s=CALL_SECONDS)
        await self._served(published.version)
        policy = Policy(self._run_id, published.version, self._services.inference, self._services.envhost)
        return await self._course.measure(policy, count, seed)

    async def _served(self, version: int) -> None:
        """Until the replica serves this run's version. Raises QuartetError."""
        deadline = time.monotonic() + SERVE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            model = await unary(
                self._services.inference.GetModel, GetModelRequest(), timeout_s=left, wait_for_ready=True
            )
            if model.run_id == self._run_id and model.policy_version >= version:
                return
            await asyncio.sleep(POLL_SECONDS)
        raise QuartetError(
            "DEADLINE", f"inference does not serve version {version} after {SERVE_SECONDS:.0f} s"
        )

    async def export(self, name: str) -> Path:
        """Save the model. Its Hugging Face folder on the trainer."""
        save = SaveStateRequest(run_id=self._run_id, seq_id=self._next(), name=name, export_model=True)
        saved = await unary(self._services.trainer.SaveState, save, timeout_s=CALL_SECONDS)
        return Path(saved.state.model_path)
