"""Experts that the embedded engine notes, against those of a plain forward pass of transformers."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch
from quartet_inference.embedded import prefill
from quartet_inference.engine import ServedWeights

from .engine_calls import caught_midway, complete, complete_one, running, update
from .random_models import causal, qwen3
from .routes import as_sets, routes, told_as_computed
from .told import random_prompt

KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("kind", KINDS)
async def test_experts_are_those_of_a_plain_pass(kind: str) -> None:
    """Guarantee 1 of embedded/experts.py, prompts of other lengths side by side."""
    model, rng = causal(kind, 0), random.Random(5)
    prompts = [random_prompt(rng, 30), [7], random_prompt(rng, 12)]
    short = {"max_model_len": 128}  # a window of GPT-OSS
    async with running(model, routed_experts=True, **short) as engine, running(model, **short) as plain:
        assert engine.info().routers == (1 if kind == "deepseek_v3" else 2) and not plain.info().routers
        told = await asyncio.gather(
            *(complete_one(engine, prompt, experts_from=0, temperature=0.0) for prompt in prompts)
        )
        same = await asyncio.gather(*(complete_one(plain, prompt, temperature=0.0) for prompt in prompts))
    assert all(told_as_computed(one, model) for one in told)
    assert [one.tokens for one in told] == [one.tokens for one in same]


async def test_what_is_shared_or_kept_tells_its_experts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a group, a later turn behind a kept prefix, and a prompt in pieces."""
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 16)
    model, prompt = causal("qwen3_moe", 1), list(range(20, 70))
    async with running(model, routed_experts=True) as engine:
        group = await complete(engine, prompt, n=3, keep_prefix=True, ignore_eos=True, experts_from=0)
        (known,) = await complete(engine, prompt, experts_from=48)
        later = [*prompt, *group[1].tokens, 1, 2, 3]
        start = len(prompt) + len(group[1].tokens) - 1
        (turn,) = await complete(engine, later, experts_from=start)
        (silent,) = await complete(engine, prompt)
    assert known.cached == 50 and turn.cached >= start
    assert all(told_as_computed(one, model) for one in group)
    assert told_as_computed(known, model, 48) and told_as_computed(turn, model, start)
    assert silent.routed is None


async def test_rows_that_lose_their_keys_keep_what_was_noted() -> None:
    """Guarantee 1 of noted.py: of an update under way, and of rows that were handed back."""
    models = {0: causal("qwen3_moe", 0), 1: causal("qwen3_moe", 1)}
    async with running(models[0], routed_experts=True) as engine:
        wanted = {"experts_from": 0, "max_tokens": 120, "temperature": 0.0}
        [met] = await caught_midway(
            engine,
            lambda: [asyncio.create_task(complete_one(engine, [5, 6, 7], **wanted))],
            completions=1,
            tokens=20,
        )
        await update(engine, models[1], ServedWeights("r", 1, b"one"))
        await engine.resume()
        told = await met
    assert set(told.versions) == {0, 1}
    sampled_by_0 = told.versions.count(0)
    before = as_sets(told.routed.experts)[: 2 + sampled_by_0]
    assert before == routes(models[0], [*told.prompt, *told.tokens])[: 2 + sampled_by_0]
    # The first token of the new weights was drawn behind one that both computed; those behind it are theirs.
    after = as_sets(told.routed.experts)[3 + sampled_by_0 :]
    assert after == routes(models[1], [*told.prompt, *told.tokens[:-1]])[3 + sampled_by_0 :]


async def test_a_prefix_tells_the_experts_of_its_own_keys() -> None:
    """Guarantee 2 of noted.py: of a row that was computed anew since its experts were told."""
    models, prompt = {0: causal("qwen3_moe", 0), 1: causal("qwen3_moe", 1)}, list(range(20, 60))
    async with running(models[0], routed_experts=True) as engine:
        wanted = {"experts_from": 0, "max_tokens": 120, "keep_prefix": True}
        [met] = await caught_midway(
            engine,
            lambda: [asyncio.create_task(complete_one(engine, prompt, **wanted))],
            completions=1,
            tokens=20,
        )
        await update(engine, models[1], ServedWeights("r", 1, b"one"))
        await engine.resume()
        assert set((await met).versions) == {0, 1}
        fresh = await complete_one(engine, [*prompt[:32], 7, 8, 9], experts_from=0)
    assert fresh.cached >= 32 and set(fresh.versions) == {1}
    assert told_as_computed(fresh, models[1])


async def test_small_kv_budget_loses_no_experts() -> None:
    model = causal("qwen3_moe", 0)
    per_token = 2 * 2 * 2 * 32 * 4
    settings = {"max_model_len": 200, "kv_cache_bytes": per_token * 300, "routed_experts": True}
    async with running(model, **settings) as engine:
        prompts = [[i, i + 1, i + 2] for i in range(8)]
        told = await asyncio.gather(
            *(complete_one(engine, prompt, experts_from=0, max_tokens=100) for prompt in prompts)
        )
    assert all(told_as_computed(one, model) for one in told)


async def test_many_experts_take_two_bytes() -> None:
    model = _wide()
    async with running(model, routed_experts=True) as engine:
        told = await complete_one(engine, [3, 4, 5], experts_from=0)
    assert told.routed.experts.dtype == np.uint16 and told.routed.experts.max() > 255
    assert told_as_computed(told, model)


def _wide() -> object:
    from transformers import AutoModelForCausalLM

    config = causal("qwen3_moe", 0).config
    config.num_experts = 300
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


async def test_a_model_without_routers_is_refused() -> None:
    """Guarantee 3 of embedded/experts.py."""
    with pytest.raises(ValueError, match=r"algorithm\.router_replay.*Qwen3ForCausalLM has no routers"):
        async with running(qwen3(0), routed_experts=True):
            pass
