"""Adapters in the embedded engine against plain forward passes of the merged models (at most 2e-5 apart)."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from quartet.errors import QuartetError
from quartet_inference.embedded import forward
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.embedded.limits import Limits
from quartet_inference.engine import (
    Delta,
    Finish,
    Request,
    Sampling,
    ScoreRequest,
    ServedWeights,
    adapter_gone,
)

from .adapters import Adapter, random_adapter

Make = Callable[..., Any]
TOLERANCE = 2e-5
END = frozenset({258})


@dataclass
class Result:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int = -1


@asynccontextmanager
async def running(model: Any, **limits: Any) -> AsyncIterator[EmbeddedEngine]:
    settings = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_bytes": 1 << 24, **limits}
    engine = EmbeddedEngine(copy.deepcopy(model), Limits(**settings), END, lambda tokens: "", None)
    await engine.swap(None, ServedWeights("", 0, engine.base_digest()))
    try:
        yield engine
    finally:
        await engine.close()


async def load(engine: EmbeddedEngine, run_id: str, version: int, adapter: Adapter) -> None:
    staged = await engine.stage_adapter(adapter.config, adapter.tensors)
    digest = f"{run_id}@{version}".encode()
    await engine.swap_adapter(staged, ServedWeights(run_id, version, digest))


async def complete(engine: EmbeddedEngine, prompt: list[int], **request: Any) -> Result:
    sampling = Sampling(
        max_tokens=request.pop("max_tokens", 24), seed=request.pop("seed", None), ignore_eos=True
    )
    result = Result(prompt)
    async for event in engine.generate(Request(tuple(prompt), sampling, **request)):
        if isinstance(event, Delta):
            result.tokens += event.token_ids
            result.logprobs += event.logprobs
            for span in event.spans:
                result.versions += [span.version] * span.length
        elif isinstance(event, Finish):
            result.cached = event.cached_tokens
    return result


def plain_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def difference(result: Result, models: dict[int, Any]) -> float:
    """The largest |engine - plain forward| of the version stamped on each token."""
    worst = 0.0
    for version in set(result.versions):
        plain = plain_logprobs(models[version], result.prompt + result.tokens)[len(result.prompt) - 1 :]
        mine = torch.tensor(result.versions) == version
        worst = max(worst, (plain - torch.tensor(result.logprobs))[mine].abs().max().item())
    return worst


@pytest.mark.parametrize("kind", ["lean", "hub"])
@pytest.mark.parametrize("tied", [True, False])
async def test_several_adapters_and_the_base_in_one_batch_while_adapters_are_replaced(
    make_model: Make, kind: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "hub":
        monkeypatch.setattr(forward, "LEAN_MODELS", frozenset())
    base = make_model(0, tie_word_embeddings=tied)
    targets = {
        "a": ("q_proj", "v_proj"),
        "b": ("o_proj", "gate_proj", "up_proj", "down_proj") + (() if tied else ("lm_head",)),
        "c": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    }
    made = {
        run: {v: random_adapter(base, 10 * i + v, 2 + i, targets=wanted) for v in range(3)}
        for i, (run, wanted) in enumerate(targets.items())
    }
    models = {run: {v: one.merged for v, one in versions.items()} for run, versions in made.items()}
    models[""] = {0: base}
    rng = random.Random(11)
    async with running(base) as engine:
        for run, versions in made.items():
            await load(engine, run, 0, versions[0])
        prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(4)]
        runs = [rng.choice(["a", "b", "c", ""]) for _ in range(24)]
        tasks = [
            asyncio.create_task(complete(engine, rng.choice(prompts), run_id=run, keep_prefix=True))
            for run in runs
        ]
        for version in (1, 2):
            for run in ("a", "b"):
                before = engine.info().tokens_sampled
                async with asyncio.timeout(20):
                    while engine.info().tokens_sampled < before + 40:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
                await load(engine, run, version, made[run][version])
        results = await asyncio.gather(*tasks)
        assert {one.version for one in engine.info().adapters} == {0, 2}
    stamped: set[tuple[str, int]] = set()
    for run, result in zip(runs, results, strict=True):
        assert difference(result, models[run]) <= TOLERANCE
        stamped |= {(run, version) for version in result.versions}
    assert {("a", 0), ("b", 0), ("c", 0), ("", 0)} < stamped
    assert len(stamped) >= 6  # updates came in flight


async def test_a_row_has_the_same_bits_alone_and_among_rows_of_others(make_model: Make) -> None:
    base = make_model(0)
    adapters = {run: random_adapter(base, seed) for seed, run in enumerate("ab")}
    async with running(base, prefix_cache_bytes=0) as engine:
        for run, adapter in adapters.items():
            await load(engine, run, 0, adapter)
        alone = [await complete(engine, [5, 6, 7], run_id=run, seed=3) for run in ("a", "b", "")]
        among = await asyncio.gather(
            *(complete(engine, [5, 6, 7], run_id=run, seed=3) for run in ("a", "b", "", "a", "b"))
        )
    assert [one.logprobs for one in among[:3]] == [one.logprobs for one in alone]
    assert among[3].logprobs == alone[0].logprobs
    assert alone[0].tokens != alone[1].tokens != alone[2].tokens


async def test_a_prefix_never_serves_another_adapter_or_version(make_model: Make) -> None:
    base = make_model(0)
    prompt = list(range(40))
    first, second = random_adapter(base, 1), random_adapter(base, 2)
    async with running(base) as engine:
        await load(engine, "a", 0, first)
        await load(engine, "b", 0, second)
        assert (await complete(engine, prompt, run_id="")).cached == 0
        assert (await complete(engine, prompt, run_id="a")).cached == 0
        assert (await complete(engine, prompt, run_id="b")).cached == 0
        assert (await complete(engine, prompt, run_id="a")).cached == 40
        await load(engine, "a", 1, second)
        again = await complete(engine, prompt, run_id="a")
        assert again.cached == 0
        assert (await complete(engine, prompt, run_id="b")).cached == 40
        assert (await complete(engine, prompt, run_id="")).cached == 40
        assert difference(again, {1: second.merged}) <= TOLERANCE


async def test_keys_that_are_kept_over_a_replacement_are_no_prefix_of_anything(make_model: Make) -> None:
    base = make_model(0)
    adapters = {version: random_adapter(base, version) for version in range(2)}
    async with running(base, recompute_on_update=False) as engine:
        await load(engine, "a", 0, adapters[0])
        task = asyncio.create_task(
            complete(engine, list(range(30)), run_id="a", max_tokens=200, keep_prefix=True)
        )
        async with asyncio.timeout(10):
            while engine.info().tokens_sampled < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await load(engine, "a", 1, adapters[1])
        mixed = await task
        assert set(mixed.versions) == {0, 1}
        known = await complete(engine, mixed.prompt + mixed.tokens[:20], run_id="a")
        assert known.cached == 0
        assert difference(known, {1: adapters[1].merged}) <= TOLERANCE


async def test_scores_are_those_of_the_adapter_and_are_pinned_to_its_version(make_model: Make) -> None:
    base = make_model(0)
    adapters = {run: random_adapter(base, seed) for seed, run in enumerate("ab")}
    rng = random.Random(4)
    texts = [[rng.randrange(256) for _ in range(length)] for length in (2, 40, 250)]
    async with running(base) as engine:
        for version, (run, adapter) in enumerate(adapters.items()):
            await load(engine, run, version, adapter)
        wanted = [(run, text) for run in ("a", "b", "") for text in texts]
        scored = await asyncio.gather(
            *(engine.score(ScoreRequest(tuple(text), ((1, len(text) - 1),), run)) for run, text in wanted)
        )
        for (run, text), one in zip(wanted, scored, strict=True):
            model = adapters[run].merged if run else base
            torch.testing.assert_close(
                torch.tensor(one.logprobs), plain_logprobs(model, text), rtol=0, atol=TOLERANCE
            )
            assert one.version == (1 if run == "b" else 0)
        with pytest.raises(QuartetError) as refused:
            await engine.score(ScoreRequest((1, 2), ((1, 1),), "a", exact_version=5))
        assert refused.value.reason == "VERSION_UNAVAILABLE"


async def test_unloading_ends_its_requests_and_no_others(make_model: Make) -> None:
    base = make_model(0)
    async with running(base) as engine:
        await load(engine, "a", 0, random_adapter(base, 1))
        await load(engine, "b", 0, random_adapter(base, 2))
        tasks = {run: asyncio.create_task(complete(engine, [1], run_id=run, max_tokens=200)) for run in "ab"}
        async with asyncio.timeout(10):
            while engine.info().tokens_sampled < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await engine.drop_adapter("a", adapter_gone("a"))
        with pytest.raises(QuartetError) as gone:
            await tasks["a"]
        assert gone.value.reason == "RUN_NOT_SERVED"
        assert len((await tasks["b"]).tokens) == 200
        with pytest.raises(QuartetError):
            await complete(engine, [1], run_id="a")
        assert [one.run_id for one in engine.info().adapters] == ["b"]
        await engine.drop_adapter("a", adapter_gone("a"))


async def test_adapters_are_bounded_in_number_and_bytes(make_model: Make) -> None:
    base = make_model(0)
    one, two = random_adapter(base, 1), random_adapter(base, 2, rank=8)
    size = sum(len(tensor.data) for tensor in one.tensors.values())
    async with running(base, max_adapters=2, adapter_bytes=2 * size) as engine:
        await load(engine, "a", 0, one)
        with pytest.raises(QuartetError, match="max_bytes") as large:
            await load(engine, "b", 0, two)
        assert large.value.reason == "OVERLOADED"
        await load(engine, "b", 0, one)
        with pytest.raises(QuartetError, match="max_count"):
            await load(engine, "c", 0, one)
        await load(engine, "a", 1, random_adapter(base, 3))  # a replacement needs no room of its own
        assert {one.version for one in engine.info().adapters} == {0, 1}


async def test_other_base_weights_take_the_adapters_with_them(make_model: Make) -> None:
    """invariant 3: upon other weights an adapter's version would compute something else."""
    base, other = make_model(0), make_model(1)
    adapter = random_adapter(base, 1)
    async with running(base) as engine:
        await load(engine, "a", 0, adapter)
        from quartet.weights.tensor import Tensor

        tensors = {
            name: Tensor("F32", tuple(p.shape), p.numpy().tobytes()) for name, p in other.named_parameters()
        }
        await engine.swap(await engine.stage(tensors), ServedWeights("full", 3, b"x"))
        assert engine.info().adapters == ()
        with pytest.raises(QuartetError, match="the model of this replica's folder"):
            await load(engine, "a", 1, adapter)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ({"config": "{}"}, "not peft's"),
        ({"settings": {"use_dora": True}}, "use_dora"),
        ({"settings": {"modules_to_save": ["norm"]}}, "modules_to_save"),
        ({"settings": {"rank_pattern": {"q_proj": 2}}}, "rank_pattern"),
        ({"settings": {"r": 3}}, "the model needs"),
        ({"rename": ("lora_B", "lora_C")}, "has no .lora_B"),
        ({"rename": ("layers.0", "layers.7")}, "no linear module"),
        ({"rename": ("q_proj.lora_A", "q_proj.magnitude")}, "no low-rank matrix"),
        ({"empty": True}, "no matrices"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_whole(
    make_model: Make, harm: dict[str, Any], why: str
) -> None:
    import json

    base = make_model(0)
    adapter = random_adapter(base, 1, targets=("q_proj",))
    config, tensors = adapter.config, adapter.tensors
    if "config" in harm:
        config = harm["config"]
    if "settings" in harm:
        config = json.dumps({**json.loads(config), **harm["settings"]})
    if "rename" in harm:
        tensors = {name.replace(*harm["rename"]): tensor for name, tensor in tensors.items()}
    if "empty" in harm:
        tensors = {}
    async with running(base) as engine:
        with pytest.raises(QuartetError, match=why) as refused:
            await load(engine, "a", 0, Adapter(config, tensors, None))
        assert refused.value.reason == "INVALID_REQUEST"
        assert engine.info().adapters == ()
