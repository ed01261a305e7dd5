"""The embedded engine: which models it decodes, and which it refuses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from quartet.errors import QuartetError
from quartet_inference.embedded import forward
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.embedded.limits import Limits
from quartet_inference.embedded.model import ModelWeights
from quartet_inference.engine import ServedWeights

from .engine_calls import END, complete, running, text_of
from .random_models import weights_of
from .told import TOLERANCE, random_prompt

Make = Callable[..., Any]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "untied"])
async def test_other_decoders(make_model: Make, family: str) -> None:
    from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Qwen2Config

    sizes = {
        "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 512, "initializer_range": 0.15,
    }  # fmt: skip

    def build() -> Any:
        if family == "untied":
            return make_model(3, tie_word_embeddings=False)
        config = {
            "llama": lambda: LlamaConfig(
                **sizes, num_key_value_heads=1, attention_bias=True,
                rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            ),
            "qwen2": lambda: Qwen2Config(**sizes, num_key_value_heads=2),
            "gpt_neox": lambda: GPTNeoXConfig(**sizes),
        }[family]()  # fmt: skip
        torch.manual_seed(4)
        return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)

    rng = random.Random(5)
    async with running(build()) as engine:
        results = await asyncio.gather(*[complete(engine, random_prompt(rng, 40), n=2) for _ in range(6)])
    assert max(r.difference({0: build()}) for group in results for r in group) <= TOLERANCE["embedded"]


def test_models_with_another_attention_are_refused(make_model: Make) -> None:
    windowed = make_model(0, use_sliding_window=True, sliding_window=64, max_window_layers=0)
    with pytest.raises(ValueError, match="window of 64"):
        forward.check_supported(windowed.config, 256)
    forward.check_supported(windowed.config, 64)
    with pytest.raises(ValueError, match="KV budget"):
        EmbeddedEngine(make_model(0), Limits(256, kv_cache_bytes=1000), END, text_of, None)


async def test_bfloat16_runs_through_transformers_own_forward(make_model: Make) -> None:
    model, new = make_model(0).bfloat16(), make_model(1).bfloat16()
    async with running(model) as engine:
        assert engine.info().dtype == "bfloat16"
        await engine.swap(await engine.stage(weights_of(new)), ServedWeights("r", 1, b""))
        result = (await complete(engine, [1, 2, 3], max_tokens=16))[0]
    assert result.difference({1: new}) < 0.2, "bfloat16 differs by batch shape, not by more"


async def test_floats_of_another_precision_are_cast_as_a_trainer_casts_them(make_model: Make) -> None:
    """layout.py 3"""
    wide, narrow = make_model(1), make_model(1).bfloat16()
    for engine_of, published in ((narrow, wide), (wide, narrow)):
        held = ModelWeights(engine_of)
        before = {name: p.clone() for name, p in engine_of.named_parameters()}
        staged = held.stage(weights_of(published))
        assert all(one.dtype == before[name].dtype for name, one in staged.tensors.items())
        held.apply(staged)
        for name, p in engine_of.named_parameters():
            assert torch.equal(p.bfloat16(), narrow.get_parameter(name).bfloat16())
    assert torch.equal(wide.model.norm.weight, narrow.model.norm.weight.float())
    numbers = {name: replace(one, dtype="I32") for name, one in weights_of(make_model(1)).items()}
    with pytest.raises(QuartetError, match="is I32"):
        held.stage(numbers)
