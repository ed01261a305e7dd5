"""The embedded engine: weights that change under requests (float32: at most 2e-5 from a plain forward)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor
from quartet_inference.embedded import forward
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.engine import ServedWeights

from .engine_calls import caught_midway, complete, running, until, update
from .random_models import weights_of
from .told import TOLERANCE, Told, behind_kept_keys, chosen, random_prompt

Make = Callable[..., Any]


@pytest.mark.parametrize("kind", ["lean", "hub"])
async def test_logprobs_while_requests_join_and_leave_and_weights_change(
    make_model: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "hub":
        monkeypatch.setattr(forward, "LEAN_MODELS", frozenset())
    versions = {version: make_model(version) for version in range(4)}
    rng = random.Random(7)
    results: list[tuple[Told, float]] = []

    async def caller(number: int, engine: EmbeddedEngine) -> None:
        await asyncio.sleep(rng.random() * 0.3)  # the load: they come one after the other
        while True:
            await conversation(number, engine)
            if engine.info().served.version == 3:
                return

    async def conversation(number: int, engine: EmbeddedEngine) -> None:
        prompt = random_prompt(rng, 40)
        temperature = rng.choice([1.0, 1.0, 0.7, 1.5])
        for _ in range(rng.randint(1, 3)):
            answers = await complete(
                engine, prompt, n=rng.choice([1, 1, 4]), temperature=temperature,
                max_tokens=rng.randint(1, 60), keep_prefix=bool(number % 2),
            )  # fmt: skip
            results.extend((answer, temperature) for answer in answers)
            prompt = answers[0].prompt + answers[0].tokens + [10, 20, 30]
            if len(prompt) > 180:
                return

    async with running(make_model(0)) as engine:
        callers = [asyncio.create_task(caller(number, engine)) for number in range(30)]
        for version in (1, 2, 3):
            staged = await engine.stage(weights_of(versions[version]))
            sampled = engine.info().tokens_sampled
            await until(lambda sampled=sampled: engine.info().tokens_sampled > sampled + 200)
            await engine.swap(staged, ServedWeights("run", version, b""))
        await asyncio.gather(*callers)
        assert engine.info().running == engine.info().waiting == 0
    assert max(result.difference(versions, temperature=t) for result, t in results) <= TOLERANCE["embedded"]
    assert any(len(set(result.versions)) > 1 for result, _ in results), (
        "no request was in flight at an update"
    )
    for result, _ in results:
        assert result.versions == sorted(result.versions)


async def test_kept_keys_survive_an_update_but_never_serve_a_new_request(make_model: Make) -> None:
    """Invariant 3: every token is stamped with what sampled it."""
    old, new = make_model(0), make_model(1)
    prompt = list(range(40))
    async with running(make_model(0), recompute_on_update=False) as engine:
        wanted = {"max_tokens": 40, "ignore_eos": True, "keep_prefix": True, "seed": 1}
        [task] = await caught_midway(
            engine,
            lambda: [asyncio.create_task(complete(engine, prompt, **wanted))],
            completions=1,
            tokens=5,
        )
        await update(engine, new, ServedWeights("run", 1, b""))
        await engine.resume()
        mixed = (await task)[0]
        assert set(mixed.versions) == {0, 1} and len(mixed.tokens) == 40
        before = mixed.versions.count(0)
        cut = Told(prompt, mixed.tokens[:before], mixed.logprobs[:before], mixed.versions[:before])
        assert cut.difference({0: old}) <= TOLERANCE["embedded"]
        assert mixed.difference({0: old, 1: new}) > 1e-3, "kept keys should differ from recomputed ones"
        plain = chosen(behind_kept_keys({0: old, 1: new}, mixed), mixed.tokens)
        assert (plain - torch.tensor(mixed.logprobs)).abs().max() <= TOLERANCE["embedded"]
        fresh = (await complete(engine, prompt + mixed.tokens))[0]
        assert fresh.finish is not None and fresh.finish.cached_tokens == 0
        assert fresh.difference({1: new}) <= TOLERANCE["embedded"]


async def test_what_leaves_the_batch_for_an_update_goes_on_before_what_waited(make_model: Make) -> None:
    """And counts among what waits for so long (commands.py 2)."""
    ended = []

    async def runs(name: str, **wanted: Any) -> None:
        await complete(engine, [1, 2], **wanted)
        ended.append(name)

    async with running(make_model(0), max_num_seqs=2, max_waiting=2) as engine:
        calls = await caught_midway(
            engine,
            lambda: [asyncio.create_task(runs("ran", max_tokens=200, ignore_eos=True)) for _ in range(2)],
            completions=2,
            tokens=2,
        )
        ended.clear()
        waited = asyncio.create_task(runs("waited", max_tokens=1))
        await until(lambda: engine.info().waiting == 1)
        await update(engine, make_model(1), ServedWeights("run", 1, b""))
        assert engine.info().waiting == 3
        await engine.resume()
        await asyncio.gather(*calls, waited)
        assert len(await complete(engine, [1], n=2)) == 2, "nothing counts as waiting any more"
    assert ended[0] == "ran"


async def test_pinned_requests_fail_when_their_weights_leave(make_model: Make) -> None:
    """swaps.py 1."""
    async with running(make_model(0)) as engine:
        await engine.swap(None, ServedWeights("a", 3, engine.base_digest()))
        long = {"max_tokens": 250, "ignore_eos": True}
        each: list[dict[str, Any]] = [{"exact_version": 3}, {"run_id": "a"}, {}]
        pinned, of_run, free = await caught_midway(
            engine,
            lambda: [asyncio.create_task(complete(engine, [1], **one, **long)) for one in each],
            completions=3,
            tokens=3,
        )
        await update(engine, make_model(1), ServedWeights("b", 1, b""))
        await engine.resume()
        for task, reason in ((pinned, "RUN_NOT_SERVED VERSION_UNAVAILABLE"), (of_run, "RUN_NOT_SERVED")):
            with pytest.raises(QuartetError) as failure:
                await task
            assert failure.value.reason in reason
        assert set((await free)[0].versions) == {3, 1}
        for wrong in ({"exact_version": 0}, {"min_version": 2}):
            with pytest.raises(QuartetError) as failure:
                await complete(engine, [1], **wrong)
            assert failure.value.reason == "VERSION_UNAVAILABLE"


async def test_weights_get_no_name_that_is_not_theirs(make_model: Make) -> None:
    """Invariant 3, swaps.py 2: others were swapped in since whoever names them has looked."""
    async with running(make_model(0)) as engine:
        await engine.swap(await engine.stage(weights_of(make_model(1))), ServedWeights("b", 1, b"other"))
        with pytest.raises(QuartetError) as late:
            await engine.swap(None, ServedWeights("", 0, engine.base_digest()))
        assert late.value.reason == "NOT_READY"
        await engine.swap(None, ServedWeights("b", 2, b"other"))
        assert set((await complete(engine, [1], max_tokens=3))[0].versions) == {2}


async def test_wrong_weights_are_refused_and_change_nothing(make_model: Make) -> None:
    good = weights_of(make_model(1))
    name = "model.layers.0.self_attn.q_proj.weight"
    partial = {k: v for k, v in good.items() if k != name}
    async with running(make_model(0)) as engine:
        for bad in (
            partial,
            {**good, "extra": good[name]},
            {**good, name: Tensor("F32", (1, 4096), good[name].data)},
            {**good, name: Tensor("I32", good[name].shape, good[name].data)},
        ):
            with pytest.raises(QuartetError) as refusal:
                await engine.stage(bad)
            assert refusal.value.reason == "INVALID_REQUEST"
        assert (await complete(engine, [1, 2]))[0].difference({0: make_model(0)}) <= TOLERANCE["embedded"]


async def test_broken_weights_fail_requests_and_good_ones_heal(make_model: Make) -> None:
    broken = make_model(1)
    broken.model.layers[1].self_attn.v_proj.weight.fill_(float("nan"))
    async with running(make_model(0)) as engine:
        await engine.swap(await engine.stage(weights_of(broken)), ServedWeights("r", 1, b""))
        with pytest.raises(QuartetError) as failure:
            await complete(engine, list(range(30)), n=4)
        assert failure.value.reason == "INTERNAL"
        await engine.swap(await engine.stage(weights_of(make_model(2))), ServedWeights("r", 2, b""))
        results = await complete(engine, [4, 5], n=4)
        assert max(r.difference({2: make_model(2)}) for r in results) <= TOLERANCE["embedded"]
