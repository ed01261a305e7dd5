"""Adapters in the embedded engine, beyond what every engine does (test_conformance_adapters.py)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet_inference.embedded import forward
from quartet_inference.engine import ServedWeights, adapter_gone

from .adapters import random_adapter
from .engine_calls import caught_midway, complete_one, load, running, until
from .told import TOLERANCE, Told

Make = Callable[..., Any]


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

        def begin() -> list[asyncio.Task[Told]]:
            wanted = {"max_tokens": 80, "keep_prefix": True}
            asked = [(rng.choice(prompts), run) for run in runs]
            return [
                asyncio.create_task(complete_one(engine, prompt, run_id=run, **wanted))
                for prompt, run in asked
            ]

        tasks = await caught_midway(engine, begin, completions=24, tokens=40)
        await load(engine, "a", 1, made["a"][1])
        await load(engine, "b", 1, made["b"][1])
        await engine.resume()
        for run in ("a", "b"):
            to = engine.info().tokens_sampled + 40
            await until(lambda to=to: engine.info().tokens_sampled >= to or all(one.done() for one in tasks))
            await load(engine, run, 2, made[run][2])
        results = await asyncio.gather(*tasks)
        assert {one.version for one in engine.info().adapters} == {0, 2}
    stamped: set[tuple[str, int]] = set()
    for run, result in zip(runs, results, strict=True):
        assert result.difference(models[run]) <= TOLERANCE["embedded"]
        stamped |= {(run, version) for version in result.versions}
    assert {("a", 0), ("b", 0), ("c", 0), ("", 0)} < stamped
    assert len(stamped) >= 6  # updates came in flight


async def test_a_row_has_the_same_bits_alone_and_among_rows_of_others(make_model: Make) -> None:
    base = make_model(0)
    adapters = {run: random_adapter(base, seed) for seed, run in enumerate("ab")}
    async with running(base, prefix_cache_bytes=0) as engine:
        for run, adapter in adapters.items():
            await load(engine, run, 0, adapter)
        alone = [await complete_one(engine, [5, 6, 7], run_id=run, seed=3) for run in ("a", "b", "")]
        among = await asyncio.gather(
            *(complete_one(engine, [5, 6, 7], run_id=run, seed=3) for run in ("a", "b", "", "a", "b"))
        )
    assert [one.logprobs for one in among[:3]] == [one.logprobs for one in alone]
    assert among[3].logprobs == alone[0].logprobs
    assert alone[0].tokens != alone[1].tokens != alone[2].tokens


async def test_an_adapter_of_the_output_layer_where_logits_are_wider_than_the_model(make_model: Make) -> None:
    """products.py 4: of some rows of a batch, and of all of it."""
    base = make_model(0, tie_word_embeddings=False).bfloat16()
    adapter = random_adapter(base.float(), 1, targets=("lm_head",))
    async with running(base.bfloat16()) as engine:
        await load(engine, "a", 0, adapter)
        asked = [complete_one(engine, [5, 6, 7], run_id=run, seed=3) for run in ("a", "", "a")]
        told = [await complete_one(engine, [5, 6], run_id="a", seed=3), *await asyncio.gather(*asked)]
    models = [adapter.merged, adapter.merged, base.float(), adapter.merged]
    # Of rare tokens bfloat16 may be off by more, hence the seed; the model of another row by 0.6 at least.
    for one, model in zip(told, models, strict=True):
        assert one.difference({0: model}) < 0.1
    assert told[1].difference({0: base}) > 0.3


async def test_keys_that_are_kept_over_a_replacement_are_no_prefix_of_anything(make_model: Make) -> None:
    base = make_model(0)
    adapters = {version: random_adapter(base, version) for version in range(2)}
    async with running(base, recompute_on_update=False) as engine:
        await load(engine, "a", 0, adapters[0])
        wanted = {"run_id": "a", "max_tokens": 200, "keep_prefix": True}
        [task] = await caught_midway(
            engine,
            lambda: [asyncio.create_task(complete_one(engine, list(range(30)), **wanted))],
            completions=1,
            tokens=20,
        )
        await load(engine, "a", 1, adapters[1])
        await engine.resume()
        mixed = await task
        assert set(mixed.versions) == {0, 1}
        known = await complete_one(engine, mixed.prompt + mixed.tokens[:20], run_id="a")
        assert known.cached == 0
        assert known.difference({1: adapters[1].merged}) <= TOLERANCE["embedded"]


async def test_a_replacement_takes_the_rows_and_prefixes_of_its_run_and_no_others(make_model: Make) -> None:
    base, prompt = make_model(0), list(range(40))
    async with running(base) as engine:
        for seed, run in enumerate("ab"):
            await load(engine, run, 0, random_adapter(base, seed))

        def begin() -> list[asyncio.Task[Told]]:
            each = ("a", "b", "")
            return [
                asyncio.create_task(complete_one(engine, prompt, run_id=run, max_tokens=60)) for run in each
            ]

        tasks = await caught_midway(engine, begin, completions=3, tokens=3)
        await load(engine, "a", 1, random_adapter(base, 2))
        assert (engine.info().running, engine.info().waiting) == (2, 1)
        await engine.resume()
        assert [len(set((await task).versions)) for task in tasks] == [2, 1, 1]
        for run in ("b", ""):
            assert (await complete_one(engine, prompt, run_id=run)).cached == 40
        owners = [slot.serial for slot in engine._decoder._bank.slots.values()]
        prefixes = engine._decoder._batch._prefixes
        assert {owner for owner, _ in prefixes._prefixes} == {0, *owners}, "nothing of what is replaced"
        await engine.drop_adapter("a", adapter_gone("a"))
        assert {owner for owner, _ in prefixes._prefixes} == {0, owners[1]}


async def test_what_is_pinned_to_a_version_of_an_adapter_ends_with_its_name(make_model: Make) -> None:
    """engine.py 4, swaps.py 1: also where the same matrices get the name of another version."""
    base = make_model(0)
    async with running(base) as engine:
        await load(engine, "a", 0, random_adapter(base, 0))

        def begin() -> list[asyncio.Task[Told]]:
            wanted = {"run_id": "a", "max_tokens": 60}
            return [
                asyncio.create_task(complete_one(engine, [1, 2], exact_version=exact, **wanted))
                for exact in (0, None)
            ]

        pinned, free = await caught_midway(engine, begin, completions=2, tokens=2)
        await engine.swap_adapter(None, ServedWeights("a", 5, b"a@0"))
        assert (engine.info().running, engine.info().updates_applied) == (1, 1), "nothing is computed anew"
        await engine.resume()
        with pytest.raises(QuartetError) as failure:
            await pinned
        assert failure.value.reason == "VERSION_UNAVAILABLE"
        assert sorted(set((await free).versions)) == [0, 5]


async def test_adapters_are_bounded_in_bytes(make_model: Make) -> None:
    base = make_model(0)
    one, two = random_adapter(base, 1), random_adapter(base, 2, rank=8)
    size = sum(len(tensor.data) for tensor in one.tensors.values())
    async with running(base, max_adapters=2, adapter_bytes=2 * size) as engine:
        await load(engine, "a", 0, one)
        with pytest.raises(QuartetError, match="max_bytes") as large:
            await load(engine, "b", 0, two)
        assert large.value.reason == "OVERLOADED"
        with pytest.raises(QuartetError, match="max_bytes") as too_large:
            await load(engine, "b", 0, random_adapter(base, 2, rank=16))
        assert too_large.value.reason == "INVALID_REQUEST", "whatever makes room, it never fits"
        await load(engine, "b", 0, one)
        await load(engine, "a", 1, random_adapter(base, 3))  # a replacement needs no room of its own
        assert {one.version for one in engine.info().adapters} == {0, 1}
