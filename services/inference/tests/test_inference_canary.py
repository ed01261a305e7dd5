"""The canary: weights that are damaged in the engine take the replica out of service until good ones come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from quartet.errors import QuartetError, from_rpc
from quartet.inference import INFERENCE
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1 import inference_service_pb2_grpc as irpc
from quartet.v1 import rollout_pb2
from quartet.v1 import weights_pb2 as pb
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet_inference import app, canary
from quartet_inference.config import InferenceConfig
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.embedded.model import ModelWeights, StagedWeights
from quartet_inference.engine import Scored, ScoreRequest
from quartet_inference.sampler import Sampler

from .engine_calls import until

TOKENS = [7 * place % 250 + 1 for place in range(48)]
Make = Callable[..., Any]
DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16")}


def cast(model: Any, dtype: str) -> dict[str, Tensor]:
    torch_dtype, name = DTYPES[dtype]
    return {
        key: Tensor(name, tuple(p.shape), p.detach().to(torch_dtype).view(torch.uint8).numpy().tobytes())
        for key, p in model.named_parameters()
    }


def canary_of(model: Any, dtype: str) -> pb.Canary:
    """What a trainer says: the cast, computed in float32."""
    kept = {key: p.data for key, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.data.to(DTYPES[dtype][0]).float()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0]
    for key, p in model.named_parameters():
        p.data = kept[key]
    logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    return pb.Canary(token_ids=TOKENS, logprobs=logprobs.tolist())


def no_numbers(sampler: Sampler, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.argmax(-1), torch.full_like(logits, torch.nan)


class Serving:
    """A replica and the store that it follows."""

    def __init__(self, stub: Any, health: Health, store: WeightStore, make_model: Make, dtype: str) -> None:
        self.stub, self.health, self.store = stub, health, store
        self._make_model, self._dtype = make_model, dtype

    def model(self, version: int) -> Any:
        return self._make_model(version + 1)

    async def publish(self, version: int, canary: pb.Canary | None = None) -> None:
        model = self.model(version)
        weights, canary = cast(model, self._dtype), canary or canary_of(model, self._dtype)
        await asyncio.to_thread(self.store.publish, "r", version, weights, canary=canary)

    async def until(self, true: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(30):
            while not true(model := await self.stub.GetModel(ipb.GetModelRequest(), timeout=30)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return model

    async def ready(self, version: int) -> Any:
        # The answer is older than what health says now.
        return await self.until(
            lambda model: (
                model.policy_version == version
                and not model.out_of_service
                and not self.health.why_not(INFERENCE)
            )
        )

    async def generate(self, max_tokens: int = 4) -> set[int]:
        request = ipb.GenerateRequest(tokens=ipb.TokensPrompt(token_ids=[1, 2, 3]))
        request.sampling.max_tokens, request.sampling.ignore_eos = max_tokens, True
        versions = set()
        async for response in self.stub.Generate(request, timeout=60):
            versions |= {span.policy_version for span in response.delta.spans}
        return versions


@asynccontextmanager
async def serving(
    folder: Path, make_model: Make, dtype: str = "float32", **settings: Any
) -> AsyncIterator[Serving]:
    store = WeightStore(keep=2)
    service = Service(SERVICE, add_weight_service, WeightServicer(store))
    trainer: RunningServer = await start([service], ServerConfig(), Health())
    embedded: Any = {"kv_cache_bytes": 1 << 24, "max_num_seqs": 4, "dtype": dtype, **settings}
    config = InferenceConfig(
        model=folder, max_model_len=256, embedded=embedded, weights_address=trainer.address
    )
    health = Health()
    async with app.services(config, health) as services:
        server = await start(services, config.server, health)
        async with connect(server.address) as channel:
            yield Serving(irpc.InferenceServiceStub(channel), health, store, make_model, dtype)  # type: ignore[no-untyped-call]
        await server.stop(0)
    await trainer.stop(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_weight_that_flips_in_the_engine_is_caught_and_the_next_version_heals(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    real = ModelWeights.apply
    damaged: list[str] = []

    def flip(self: ModelWeights, staged: StagedWeights) -> None:
        real(self, staged)
        if damaged:
            # The top bit of one exponent, as a cosmic ray or a bad module would.
            raw = self._parameters[damaged[0]].data.view(-1)
            raw[5] = float(raw[5]) * 2**6 + 40

    draw = Sampler.draw

    def slowly(self: Sampler, logits: Any) -> Any:
        time.sleep(0.1)
        return draw(self, logits)

    monkeypatch.setattr(ModelWeights, "apply", flip)
    async with serving(model_folder, make_model, dtype) as replica:
        await replica.publish(0)
        await replica.ready(0)
        assert await replica.generate() == {0}

        damaged.append("model.layers.1.mlp.down_proj.weight")
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "draw", slowly)  # what runs does not end before the verdict
            running = asyncio.create_task(replica.generate(max_tokens=200))
            await replica.until(lambda model: model.running > 0)
            await replica.publish(1)
            model = await replica.until(lambda model: bool(model.out_of_service))
        assert "not those of version 1" in model.out_of_service
        assert "not those of version 1" in replica.health.why_not(INFERENCE)
        for call in (running, replica.generate()):
            with pytest.raises(Exception, match="out of service"):
                await call
        await replica.until(lambda model: model.running == 0)

        damaged.clear()
        await replica.publish(2)
        assert not (await replica.ready(2)).out_of_service
        assert await replica.generate() == {2}


async def test_sound_weights_stay_in_service_through_many_versions(
    model_folder: Path, make_model: Make
) -> None:
    async with serving(model_folder, make_model) as replica:
        for version in range(4):
            await replica.publish(version)
            await replica.ready(version)


async def test_a_canary_that_cannot_be_scored_is_the_publishers_fault(
    model_folder: Path, make_model: Make, refusals: list[QuartetError]
) -> None:
    """It is refused before the swap: the old version goes on serving."""
    async with serving(model_folder, make_model) as replica:
        await replica.publish(0)
        await replica.ready(0)
        bad = pb.Canary(token_ids=[1, 2, 3], logprobs=[-1.0])
        await asyncio.to_thread(replica.store.publish, "r", 1, cast(make_model(9), "float32"), canary=bad)
        await until(lambda: bool(refusals))
        assert refusals[0].reason == "CHECKSUM_MISMATCH"
        assert await replica.generate() == {0}
        told = await replica.until(lambda model: bool(model.update_refused))
        assert "version 1 could not be taken: canary" in told.update_refused
        await replica.publish(2)
        await replica.ready(2)
        # The note goes once the follower is back from the swap, a moment after the version serves.
        await replica.until(lambda model: not model.update_refused)


async def test_a_canary_that_the_device_has_no_room_for_is_scored_once_it_has(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """canary.py 4: as beside a trainer on the same GPU. It would wait for another version for ever."""
    score, refused = EmbeddedEngine.score, 0

    async def without_room(self: Any, request: ScoreRequest) -> Scored:
        nonlocal refused
        if refused < 2:
            refused += 1
            raise QuartetError("OVERLOADED", "the memory of the device does not reach")
        return await score(self, request)

    monkeypatch.setattr(canary, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(EmbeddedEngine, "score", without_room)
    async with serving(model_folder, make_model) as replica:
        await replica.publish(0)
        await replica.ready(0)
    assert refused == 2


async def test_a_model_of_another_vocabulary_is_told_by_its_tensors_and_offered_once(
    model_folder: Path, make_model: Make, refusals: list[QuartetError]
) -> None:
    """Its canary is of the other vocabulary, too: that is not what is wrong."""
    async with serving(model_folder, make_model) as replica:
        await replica.publish(0)
        await replica.ready(0)
        other, tokens = make_model(9, vocab_size=512), [1, 500]
        canary = pb.Canary(token_ids=tokens, logprobs=[-1.0])
        await asyncio.to_thread(replica.store.publish, "r", 1, cast(other, "float32"), canary=canary)
        model = await replica.until(lambda model: bool(model.update_refused))
        assert "version 1 could not be taken: tensor " in model.update_refused
        assert "is F32 [512, 64], the model has F32 [260, 64]" in model.update_refused
        await asyncio.sleep(1)
        assert [one.reason for one in refusals] == ["INVALID_REQUEST"]


async def test_weights_that_compute_no_numbers_are_not_served_without_a_canary_either(
    model_folder: Path, make_model: Make
) -> None:
    """canary.py 2."""
    async with serving(model_folder, make_model) as replica:
        sound, broken = cast(replica.model(0), "float32"), cast(replica.model(1), "float32")
        norm = broken["model.norm.weight"]
        broken["model.norm.weight"] = Tensor(norm.dtype, norm.shape, b"\xff" * len(norm.data))
        await asyncio.to_thread(replica.store.publish, "r", 0, sound)
        await replica.ready(0)
        await asyncio.to_thread(replica.store.publish, "r", 1, broken)
        model = await replica.until(lambda model: bool(model.out_of_service))
        assert "version 1 give log-probabilities that are no numbers" in model.out_of_service
        with pytest.raises(Exception, match="out of service"):
            await replica.generate()
        await asyncio.to_thread(replica.store.publish, "r", 2, sound)
        await replica.ready(2)
        assert await replica.generate() == {2}


async def test_what_runs_on_weights_that_compute_no_numbers_is_told_that_they_are_out_of_service(
    model_folder: Path, make_model: Make
) -> None:
    """canary.py 1: it meets them in the first step, before the canary is scored."""
    async with serving(model_folder, make_model) as replica:
        broken = cast(replica.model(1), "float32")
        norm = broken["model.norm.weight"]
        broken["model.norm.weight"] = Tensor(norm.dtype, norm.shape, b"\xff" * len(norm.data))
        await replica.publish(0)
        await replica.ready(0)
        await replica.stub.Pause(ipb.PauseRequest(), timeout=30)
        sample = rollout_pb2.Sample(token_ids=[1, 2, 3], spans=[rollout_pb2.PolicySpan(start=1, length=2)])
        running = [
            asyncio.create_task(replica.generate(100)),
            asyncio.create_task(replica.generate(100)),
            asyncio.ensure_future(replica.stub.Score(ipb.ScoreRequest(samples=[sample]), timeout=60)),
        ]
        await replica.until(lambda model: model.running + model.waiting == 2)
        await asyncio.to_thread(
            replica.store.publish, "r", 1, broken, canary=canary_of(replica.model(1), "float32")
        )
        await replica.until(lambda model: model.policy_version == 1)
        await replica.stub.Resume(ipb.ResumeRequest(), timeout=30)
        for call in running:
            with pytest.raises(grpc.RpcError) as failed:
                await call
            error = from_rpc(failed.value)
            assert error.reason == "NOT_READY" and "grpc_code" not in error.metadata, error
            assert "version 1 give log-probabilities that are no numbers" in error.message
            assert "the next version whose canary is right ends this" in error.message


async def test_a_request_alone_that_meets_no_numbers_fails_with_internal_once_the_canary_lives(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """canary.py 1: another replica would say the same of it."""
    async with serving(model_folder, make_model) as replica:
        await replica.publish(0)
        await replica.ready(0)
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "choose", no_numbers)
            with pytest.raises(grpc.RpcError) as failed:
                await replica.generate()
        assert from_rpc(failed.value).reason == "INTERNAL"
        assert await replica.generate() == {0}


async def test_a_full_queue_keeps_no_weights_from_being_checked(model_folder: Path, make_model: Make) -> None:
    """canary.py 4."""
    async with serving(model_folder, make_model, max_waiting=2) as replica:
        await replica.publish(0)
        await replica.ready(0)
        await replica.stub.Pause(ipb.PauseRequest(), timeout=30)
        sample = rollout_pb2.Sample(token_ids=[1, 2, 3], spans=[rollout_pb2.PolicySpan(start=1, length=2)])
        waiting = [replica.stub.Score(ipb.ScoreRequest(samples=[sample]), timeout=60) for _ in range(2)]
        with pytest.raises(Exception, match="wait already"):
            await replica.stub.Score(ipb.ScoreRequest(samples=[sample]), timeout=30)
        wrong = canary_of(replica.model(2), "float32")
        await replica.publish(1, wrong)
        await replica.until(lambda model: model.policy_version == 1)
        await replica.stub.Resume(ipb.ResumeRequest(), timeout=30)
        model = await replica.until(lambda model: bool(model.out_of_service))
        assert "not those of version 1" in model.out_of_service
        await asyncio.gather(*waiting, return_exceptions=True)  # they came before the verdict or behind it
        await replica.publish(2)
        await replica.ready(2)
        assert await replica.generate() == {2}
