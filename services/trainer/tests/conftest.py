"""A tiny Qwen3 folder, samples, and a trainer that can be called."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from quartet.errors import QuartetError, from_rpc
from quartet.kit.channel import connect
from quartet.v1 import rollout_pb2
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub

from .ranked import alone_in_a_group, call_ranks, group_of_one, three_ranks, two_ranks

__all__ = ["alone_in_a_group", "call_ranks", "group_of_one", "three_ranks", "two_ranks"]

VOCAB = 96


@pytest.fixture(autouse=True)
def weights_are_the_same() -> None:
    """Of models that a test makes without a seed of its own: how it meets a bound is no matter of chance."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def folder(small_qwen3: Path) -> Path:
    """The model that nearly every test trains."""
    return small_qwen3


@pytest.fixture
def untied(folder: Path, tmp_path: Path) -> Path:
    """A model of that shape whose output layer is a matrix of its own."""
    import transformers

    made = shutil.copytree(folder, tmp_path / "untied")
    config = transformers.AutoConfig.from_pretrained(made, tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made)
    return made


Made = list[pb.TrainingSample]


@pytest.fixture
def make_samples() -> Callable[..., Made]:
    """Ragged groups: `groups` prompts with `members` completions each."""

    def make(groups: int = 3, members: int = 4, seed: int = 0, version: int = 0) -> Made:
        rng = np.random.default_rng(seed)
        made = []
        for _ in range(groups):
            prompt = rng.integers(0, VOCAB, rng.integers(4, 20)).tolist()
            for _ in range(members):
                tail = rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
                span = rollout_pb2.PolicySpan(start=len(prompt), length=len(tail), policy_version=version)
                sample = rollout_pb2.Sample(
                    token_ids=prompt + tail,
                    spans=[span],
                    logprobs=rng.uniform(-6, -2, len(tail)).astype(np.float32),
                )
                made.append(pb.TrainingSample(sample=sample, advantages=[float(rng.normal())]))
        return made

    return make


@pytest.fixture
def plain_logprobs() -> Callable[..., list[np.ndarray]]:
    """Of what each sample covers, by a model's own forward pass, one sample at a time."""

    def of(model: Any, samples: Made) -> list[np.ndarray]:
        import torch

        found = []
        for one in samples:
            ids = torch.tensor([list(one.sample.token_ids)])
            with torch.no_grad():
                logp = torch.log_softmax(model.eval()(ids).logits[0].float(), -1)
            start = one.sample.spans[0].start
            found.append(logp[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy())
        return found

    return of


@dataclass
class Served:
    """A trainer that can be called, and what is behind it."""

    stub: Any
    channel: grpc.aio.Channel
    state_dir: Path
    address: str = ""

    async def create(self, run_id: str = "r", **spec: Any) -> pb.RunState:
        response = await self.stub.CreateRun(pb.CreateRunRequest(run_id=run_id, spec=run_spec(**spec)))
        return response.run

    async def forward_backward(self, seq_id: int, samples: Made, run_id: str = "r", **start: Any) -> Any:
        count = sum(len(one.sample.logprobs) or 1 for one in samples)
        kind = start.pop("loss", None) or pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT)
        first = pb.ForwardBackwardStart(
            run_id=run_id, seq_id=seq_id, loss=kind, **{"normalizer": count, **start}
        )
        return await self.stub.ForwardBackward(self.frames(pb.ForwardBackwardRequest, first, samples))

    async def forward(self, samples: Made, **start: Any) -> list[list[float]]:
        frames = self.frames(pb.ForwardRequest, pb.ForwardStart(**{"run_id": "r", **start}), samples)
        return [list(one.logprobs) async for one in self.stub.Forward(frames)]

    @staticmethod
    async def frames(kind: Any, start: Any, samples: Made, commit: bool = True) -> AsyncIterator[Any]:
        yield kind(start=start)
        for at in range(0, len(samples), 5):
            yield kind(batch=pb.SampleBatch(samples=samples[at : at + 5]))
        if commit:
            tokens = sum(len(one.sample.token_ids) for one in samples)
            yield kind(commit=pb.StreamCommit(sample_count=len(samples), token_count=tokens))

    async def optim_step(self, seq_id: int, **fields: Any) -> pb.OptimStepResponse:
        return await self.stub.OptimStep(pb.OptimStepRequest(run_id="r", seq_id=seq_id, **fields))

    async def publish(self, seq_id: int) -> pb.PublishWeightsResponse:
        return await self.stub.PublishWeights(pb.PublishWeightsRequest(run_id="r", seq_id=seq_id))

    async def save(self, seq_id: int, name: str, export: bool = False) -> pb.SavedState:
        request = pb.SaveStateRequest(run_id="r", seq_id=seq_id, name=name, export_model=export)
        return (await self.stub.SaveState(request)).state

    async def one_step(self, seq_id: int, samples: Made) -> tuple[float, float, bytes]:
        """Three calls; (loss, gradient norm, digest of what was published)."""
        done = await self.forward_backward(seq_id, samples)
        stepped = await self.optim_step(seq_id + 1)
        published = await self.publish(seq_id + 2)
        return done.loss, stepped.grad_norm, published.digest

    @staticmethod
    async def refused(call: Awaitable[Any], reason: str) -> QuartetError:
        """The error of a call that must be refused for this reason."""
        with pytest.raises(grpc.RpcError) as raised:
            await call
        error = from_rpc(raised.value)
        assert error.reason == reason, error
        return error


def run_spec(**spec: Any) -> pb.RunSpec:
    """A run's spec; learning_rate and other keys of the optimizer may be given flat."""
    optimizer = {
        key: spec.pop(key) for key in list(spec) if key in pb.OptimizerSpec.DESCRIPTOR.fields_by_name
    }
    return pb.RunSpec(optimizer=pb.OptimizerSpec(**{"learning_rate": 1e-2, **optimizer}), **spec)


@pytest.fixture
def serve_trainer(tmp_path: Path, serving_trainer: Callable[..., Any]) -> Callable[..., Any]:
    """An async context that serves a trainer; each use is a restart over the same state_dir."""

    @contextlib.asynccontextmanager
    async def serve(**config: Any) -> AsyncIterator[Served]:
        states = tmp_path / "states"
        async with serving_trainer(states, **config) as address, connect(address) as channel:
            yield Served(TrainerServiceStub(channel), channel, states, address)

    return serve
