"""Adapters in the vLLM engine against plain forward passes of the merged models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import torch
from quartet.errors import QuartetError
from quartet_inference.config import InferenceConfig
from quartet_inference.engine import (
    Delta,
    Finish,
    Request,
    Sampling,
    ScoreRequest,
    ServedWeights,
    adapter_gone,
)
from quartet_inference.vllm import environment

from .adapters import Adapter, random_adapter

pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")
pytestmark = pytest.mark.asyncio(loop_scope="module")

TOLERANCE = 5e-5
RANK = 8


class Told:
    """What an engine has told of one completion."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.cached = prompt, -1
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Any]
) -> AsyncIterator[Any]:
    environment.prepare(1)
    from quartet_inference.vllm.start import start

    folder = tmp_path_factory.mktemp("vllm-lora")
    make_model(0, head_dim=32).save_pretrained(folder)
    config = InferenceConfig(
        model=folder,
        engine="vllm",
        max_model_len=256,
        vllm={"kv_cache_bytes": 1 << 24, "max_num_seqs": 16, "max_lora_rank": RANK, "max_loras": 2},
        adapters={"max_count": 3},
    )
    made = await asyncio.to_thread(start, config, frozenset({258}), lambda tokens: "", lambda: None)
    yield made
    await made.close()


@pytest.fixture
def base(make_model: Callable[..., Any]) -> Any:
    return make_model(0, head_dim=32)


async def load(engine: Any, run_id: str, version: int, adapter: Adapter) -> None:
    staged = await engine.stage_adapter(adapter.config, adapter.tensors)
    await engine.swap_adapter(staged, ServedWeights(run_id, version, f"{run_id}@{version}".encode()))


async def unload_all(engine: Any) -> None:
    for one in engine.info().adapters:
        await engine.drop_adapter(one.run_id, adapter_gone(one.run_id))


async def complete(engine: Any, prompt: list[int], run_id: str, **wanted: Any) -> Told:
    sampling = Sampling(**{"max_tokens": 24, "ignore_eos": True, "seed": 5, **wanted})
    told = Told(prompt)
    async for event in engine.generate(Request(tuple(prompt), sampling, run_id=run_id)):
        if isinstance(event, Delta):
            told.tokens += event.token_ids
            told.logprobs += event.logprobs
            for span in event.spans:
                told.versions += [span.version] * span.length
        elif isinstance(event, Finish):
            told.cached = event.cached_tokens
    return told


def plain(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def difference(told: Told, models: dict[int, Any]) -> float:
    worst = 0.0
    for version in set(told.versions):
        mine = torch.tensor(told.versions) == version
        expected = plain(models[version], told.prompt + told.tokens)[len(told.prompt) - 1 :]
        worst = max(worst, float((expected - torch.tensor(told.logprobs))[mine].abs().max()))
    return worst


async def test_adapters_and_the_base_in_one_batch(engine: Any, base: Any) -> None:
    """vLLM 0.32 on a CPU gives rows without an adapter the last one's matrices."""
    adapters = {run: random_adapter(base, seed, rank=2 + 3 * seed) for seed, run in enumerate("abc")}
    for version, (run, adapter) in enumerate(adapters.items()):
        await load(engine, run, version, adapter)
    runs = ["a", "", "b", "", "c", "a", "b", ""]
    told = await asyncio.gather(*(complete(engine, [7, number], run) for number, run in enumerate(runs)))
    for run, one in zip(runs, told, strict=True):
        version = "abc".index(run) if run else 0
        model = adapters[run].merged if run else base
        assert set(one.versions) == {version}
        assert difference(one, {version: model}) <= TOLERANCE
    await unload_all(engine)


async def test_an_adapter_is_replaced_in_flight_and_no_prefix_outlives_it(engine: Any, base: Any) -> None:
    adapters = {version: random_adapter(base, 40 + version) for version in range(3)}
    models = {version: one.merged for version, one in adapters.items()}
    prompt = list(range(100))
    await load(engine, "a", 0, adapters[0])
    first = await complete(engine, prompt, "a")
    assert (await complete(engine, prompt, "a")).cached > 0
    tasks = [asyncio.create_task(complete(engine, prompt[:n], "a", max_tokens=120)) for n in (1, 50, 100)]
    tasks.append(asyncio.create_task(complete(engine, prompt, "", max_tokens=120)))
    for version in (1, 2):
        before = engine.info().tokens_sampled
        async with asyncio.timeout(60):
            while engine.info().tokens_sampled < before + 100:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await load(engine, "a", version, adapters[version])
    told = await asyncio.gather(*tasks)
    assert {version for one in told[:3] for version in one.versions} == {0, 1, 2}
    assert all(len(one.tokens) == 120 for one in told)
    assert all(difference(one, models) <= TOLERANCE for one in told[:3])
    assert difference(told[3], {0: base}) <= TOLERANCE
    again = await complete(engine, prompt, "a")
    assert set(again.versions) == {2} and difference(again, models) <= TOLERANCE
    assert again.tokens != first.tokens
    async with asyncio.timeout(20):
        while len(await engine._running.llm.list_loras()) > 1:  # noqa: ASYNC110 - the replaced ones leave vLLM
            await asyncio.sleep(0.05)
    await unload_all(engine)


async def test_scores_and_refusals(engine: Any, base: Any) -> None:
    adapter = random_adapter(base, 60)
    text = tuple(range(3, 90))
    await load(engine, "a", 4, adapter)
    for run, model, version in (("a", adapter.merged, 4), ("", base, 0)):
        scored = await engine.score(ScoreRequest(text, ((1, len(text) - 1),), run))
        expected = plain(model, list(text))
        torch.testing.assert_close(torch.tensor(scored.logprobs), expected, rtol=0, atol=TOLERANCE)
        assert scored.version == version
    running = asyncio.create_task(complete(engine, [1], "a", max_tokens=200))
    await asyncio.sleep(0.1)
    await engine.drop_adapter("a", adapter_gone("a"))
    with pytest.raises(QuartetError) as gone:
        await running
    assert gone.value.reason == "RUN_NOT_SERVED"
    with pytest.raises(QuartetError):
        await complete(engine, [1], "a")
    with pytest.raises(QuartetError, match="max_lora_rank"):
        await load(engine, "a", 0, random_adapter(base, 1, rank=RANK + 1))
    for run in "abc":
        await load(engine, run, 0, adapter)
    with pytest.raises(QuartetError) as full:
        await load(engine, "d", 0, adapter)
    assert full.value.reason == "OVERLOADED"
    await unload_all(engine)


async def test_base_weights_change_exactly_beside_room_for_adapters(
    engine: Any, base: Any, make_model: Callable[..., Any]
) -> None:
    from quartet.weights.tensor import Tensor

    adapter = random_adapter(base, 70)
    await load(engine, "a", 0, adapter)

    async def swap(model: Any, weights: ServedWeights) -> None:
        tensors = {
            name: Tensor("F32", tuple(p.shape), p.numpy().tobytes()) for name, p in model.named_parameters()
        }
        await engine.swap(await engine.stage(tensors), weights)

    other = make_model(1, head_dim=32)
    await swap(other, ServedWeights("r", 1, b"other"))
    assert engine.info().adapters == ()
    assert difference(await complete(engine, [1, 2], "r"), {1: other}) <= TOLERANCE
    with pytest.raises(QuartetError, match="this replica's folder"):
        await load(engine, "a", 1, adapter)
    await swap(base, ServedWeights("", 0, engine.base_digest()))
    await load(engine, "a", 1, adapter)
    assert difference(await complete(engine, [1, 2], "a"), {1: adapter.merged}) <= TOLERANCE
    await unload_all(engine)
