"""The Score RPC over loopback gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from quartet.errors import QuartetError, from_rpc
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import start
from quartet.v1 import common_pb2, rollout_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import inference_service_pb2_grpc as rpc
from quartet_inference import app, scoring
from quartet_inference.config import InferenceConfig


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Any]:
    """A stub of a running service."""
    config = InferenceConfig.model_validate(
        {"model": folder, "max_model_len": 256, "embedded": {"kv_cache_bytes": 1 << 24}}
    )
    health = Health()
    async with app.services(config, health) as services:
        server = await start(services, config.server, health)
        async with connect(server.address) as channel:
            yield rpc.InferenceServiceStub(channel)
        await server.stop(0)


def sample(tokens: list[int], *spans: tuple[int, int]) -> rollout_pb2.Sample:
    marks = [rollout_pb2.PolicySpan(start=start, length=length) for start, length in spans]
    return rollout_pb2.Sample(token_ids=tokens, spans=marks)


async def test_score_agrees_with_what_was_sampled_and_with_a_forward_pass(
    model_folder: Path, make_model: Callable[..., Any]
) -> None:
    async with serving(model_folder) as stub:
        prompt = [5, 6, 7]
        request = pb.GenerateRequest(
            tokens=pb.TokensPrompt(token_ids=prompt), sampling=common_pb2.SamplingParams(max_tokens=20)
        )
        sampled: list[int] = []
        logprobs: list[float] = []
        async for frame in stub.Generate(request, timeout=20):
            sampled += frame.delta.token_ids
            logprobs += frame.delta.logprobs
        whole = sample([*prompt, *sampled], (3, len(sampled)))
        other = sample(list(range(50)), (1, 4), (20, 3))
        wanted = pb.ScoreRequest(samples=[whole, other, sample([1])], exact_policy_version=0)
        answer = await stub.Score(wanted, timeout=20)
        assert [one.policy_version for one in answer.samples] == [0, 0, 0]
        assert list(answer.samples[0].logprobs) == pytest.approx(logprobs, abs=2e-5)
        with torch.no_grad():
            plain = make_model(0)(torch.tensor([list(range(50))])).logits[0].log_softmax(-1)
        want = [float(plain[p - 1, p]) for p in (1, 2, 3, 4, 20, 21, 22)]
        assert list(answer.samples[1].logprobs) == pytest.approx(want, abs=2e-5)
        assert list(answer.samples[2].logprobs) == []


async def test_malformed_samples_are_typed(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_COVERED", 300)
    async with serving(model_folder) as stub:
        good = sample([1, 2, 3], (1, 2))
        backwards = sample([1] * 9, (4, 2), (2, 1))
        cases: list[tuple[pb.ScoreRequest, str, str]] = [
            (pb.ScoreRequest(samples=[good, sample([])]), "INVALID_REQUEST", "samples[1].token_ids"),
            (pb.ScoreRequest(samples=[sample([1, 260])]), "INVALID_REQUEST", "samples[0].token_ids"),
            (pb.ScoreRequest(samples=[sample([1, 2], (0, 1))]), "INVALID_REQUEST", "samples[0].spans"),
            (pb.ScoreRequest(samples=[sample([1, 2], (1, 2))]), "INVALID_REQUEST", "samples[0].spans"),
            (pb.ScoreRequest(samples=[sample([1, 2], (1, 0))]), "INVALID_REQUEST", "samples[0].spans"),
            (pb.ScoreRequest(samples=[backwards]), "INVALID_REQUEST", "samples[0].spans"),
            (pb.ScoreRequest(samples=[sample([1] * 9, (1, 301))]), "INVALID_REQUEST", "samples.spans"),
            (pb.ScoreRequest(samples=[sample([1])] * 1025), "INVALID_REQUEST", "samples"),
            (pb.ScoreRequest(samples=[good, sample([1] * 257)]), "PROMPT_TOO_LONG", ""),
            (pb.ScoreRequest(samples=[good], exact_policy_version=3), "VERSION_UNAVAILABLE", ""),
            (pb.ScoreRequest(samples=[good, good], run_id="r"), "RUN_NOT_SERVED", ""),
        ]  # fmt: skip
        for request, reason, field in cases:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Score(request, timeout=20)
            error: QuartetError = from_rpc(caught.value)
            assert (error.reason, error.metadata.get("field", "")) == (reason, field), request
        assert len((await stub.Score(pb.ScoreRequest(), timeout=5)).samples) == 0
        longest = sample([1] * 256, (255, 1))
        assert len((await stub.Score(pb.ScoreRequest(samples=[longest]), timeout=5)).samples[0].logprobs) == 1
