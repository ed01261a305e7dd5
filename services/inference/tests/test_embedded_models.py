"""The embedded engine: which models it decodes, and which it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet_inference.embedded import model
from quartet_inference.embedded.commands import Commands
from quartet_inference.embedded.decoder import Decoder
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.embedded.limits import Limits
from quartet_inference.embedded.model import ModelWeights
from quartet_inference.engine import ServedWeights
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, XLNetConfig

from .engine_calls import END, complete, running, text_of
from .random_models import weights_of
from .told import TOLERANCE, on_bfloat16_grid, random_prompt

Make = Callable[..., Any]


SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512,
    "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
}  # fmt: skip
LONGROPE = {"rope_parameters": LONG, "original_max_position_embeddings": 256, "sliding_window": None}
LOCAL = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
FULL = {"layer_types": ["full_attention"] * 2}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: What of each kind a plain decoder does not have.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "untied": ("qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
    "learned positions": ("gpt2", GPT2),
    "one key head that no setting names": ("gpt_bigcode", {**GPT2, "multi_query": True}),
    "values of another size than keys": ("deepseek_v3", LATENT),
    "eager attention with caps": ("gemma2", {"head_dim": 16, **FULL}),
    "eager attention with sinks": ("gpt_oss", {"head_dim": 16, **MOE, **FULL}),
    "a mask given by name": (
        "afmoe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1, **FULL},
    ),
    "two sets of rotations": ("phi3", LONGROPE),
}


def made(kind: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(4)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("name", DECODERS)
async def test_other_decoders(name: str) -> None:
    """probe.py 1, on models that pass it; hub.py 1 and 2."""
    model, rng = made(*DECODERS[name]), random.Random(5)
    async with running(model) as engine:
        results = await asyncio.gather(*[complete(engine, random_prompt(rng, 40), n=2) for _ in range(6)])
    assert max(r.difference({0: model}) for group in results for r in group) <= TOLERANCE["embedded"]


def started(kind: str, changes: dict[str, Any], max_model_len: int) -> Decoder:
    limits = Limits(max_model_len, kv_cache_bytes=1 << 24)
    return Decoder(made(kind, changes), limits, END, text_of, None, lambda: None, Commands(1))


@pytest.mark.parametrize(
    ("kind", "changes", "most"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, 64),
        ("phi3", {"sliding_window": 64}, 64),
        ("mixtral", {"sliding_window": 64, **MOE}, 64),
        ("phi3", LONGROPE, 256),
    ],
    ids=["by layers", "of all layers", "of a mixture", "longrope"],
)
def test_what_a_row_of_the_cache_does_not_hold_bounds_the_length(
    kind: str, changes: dict[str, Any], most: int
) -> None:
    """probe.py 2: a window, and a rotation that changes with the longest row."""
    with pytest.raises(ValueError, match=rf"set max_model_len to at most (that|{most}), or use engine vllm"):
        started(kind, changes, most + 1)
    started(kind, changes, most)


@pytest.mark.parametrize("most", range(2, 8))
def test_rows_may_be_as_short_as_the_probe_itself(most: int) -> None:
    """probe.py 1: of two sequences one may have too few tokens for two pieces."""
    started("qwen2", {}, most)


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("bert", {"is_decoder": False}, "BertLMHeadModel decodes log-probabilities that are .* off"),
        ("roberta", {"is_decoder": True}, "RobertaForCausalLM decodes log-probabilities that are .* off"),
        ("bloom", {}, "BloomForCausalLM does not decode with positions, a mask"),
        ("gpt_neo", LOCAL, "layers of type global, local"),
        ("mamba", {}, "layers of type linear_attention"),
    ],
)
def test_models_with_another_attention_are_refused(kind: str, changes: dict[str, Any], why: str) -> None:
    """probe.py 1, hub.py 1: what sees later tokens or counts positions otherwise, and what keeps more."""
    with pytest.raises(ValueError, match=why):
        started(kind, changes, 64)


def test_a_folder_without_all_weights_of_the_model_is_refused(model_folder: Path, tmp_path: Path) -> None:
    """transformers takes random numbers for what is missing."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    lost = tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, weights, {"format": "pt"})
    why = "its weights lack 1 tensors, the first is model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ConfigError, match=why):
        model.load(folder, "float32", weights_follow=False)
    assert model.load(folder, "float32", weights_follow=True), "a trainer's replace them all"
    save_file({**tensors, "model.layers.1.mlp.down_proj.weight": lost[1:]}, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        model.load(folder, "float32", weights_follow=False)
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        model.load(folder, "float32", weights_follow=False)


def test_a_quantized_model_is_widened_or_refused(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """model.py 6, where a GPU computes in 8 bits and transformers would let the weights be."""
    folder, name = tmp_path / "model", "model.layers.1.mlp.down_proj.weight"
    shutil.copytree(model_folder, folder)
    tensors, said = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    narrow, scale = tensors.pop(name).to(torch.float8_e4m3fn), torch.full((1, 1), 0.5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def load(scale_name: str, method: str) -> nn.Module:
        scaled = {**tensors, name: narrow, f"model.layers.1.mlp.down_proj.{scale_name}": scale}
        save_file(scaled, folder / "model.safetensors", {"format": "pt"})
        others = [
            f"model.layers.{layer}.{part}"
            for layer in (0, 1)
            for part in ("self_attn", "mlp.gate_proj", "mlp.up_proj")
        ]
        settings = {
            "quant_method": method,
            "modules_to_not_convert": [*others, "model.layers.0.mlp.down_proj"],
        }
        (folder / "config.json").write_text(json.dumps(said | {"quantization_config": settings}))
        return model.load(folder, "float32", weights_follow=False)

    widened = load("weight_scale_inv", "fp8")
    assert torch.equal(widened.get_parameter(name), 0.5 * narrow.float())
    assert {kind for kind, _ in ModelWeights(widened).layout().values()} == {"F32"}
    with pytest.raises(ConfigError, match=r"does not read the scales .*down_proj\.weight_scale; name the"):
        load("weight_scale", "fp8")
    with pytest.raises(ConfigError, match=r"its weights are quantized \(awq\); name the model"):
        load("scales", "awq")


def test_a_length_is_asked_for_or_known(make_model: Make) -> None:
    assert model.made_for(make_model(0), None) == 512 and model.made_for(make_model(0), 9) == 9
    with pytest.raises(ConfigError, match="the model was made for 512"):
        model.made_for(make_model(0), 513)
    endless = AutoModelForCausalLM.from_config(XLNetConfig(vocab_size=260, d_model=64, n_layer=1, n_head=4))
    assert model.made_for(endless, 64) == 64
    with pytest.raises(ConfigError, match="XLNetLMHeadModel does not say what it was made for; set it"):
        model.made_for(endless, None)


def test_a_budget_below_one_sequence_is_refused(make_model: Make) -> None:
    with pytest.raises(ValueError, match="KV budget"):
        EmbeddedEngine(make_model(0), Limits(256, kv_cache_bytes=1000), END, text_of, None)


async def test_a_bfloat16_model_is_served_and_updated(make_model: Make) -> None:
    model, new = make_model(0).bfloat16(), make_model(1).bfloat16()
    async with running(model) as engine:
        assert engine.info().dtype == "bfloat16"
        await engine.swap(await engine.stage(weights_of(new)), ServedWeights("r", 1, b""))
        result = (await complete(engine, [1, 2, 3], max_tokens=16))[0]
        (told,) = await complete(engine, [1, 2, 3], top=8)
        assert on_bfloat16_grid(told) < 0.1, "products.py 4"
    assert result.difference({1: new}) < 0.2, "bfloat16 differs by batch shape, not by more"


async def test_a_model_of_two_float_types_is_served_and_updated(tmp_path: Path) -> None:
    """Routers of ERNIE's mixture stay in float32. All its experts are asked: which of them come first may
    differ by batch shape in bfloat16, and then so does everything."""
    changes = {"moe_num_experts": 4, "moe_k": 4, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    wide = made("ernie4_5_moe", changes)
    wide.save_pretrained(tmp_path)
    narrow = model.load(tmp_path, "bfloat16", weights_follow=False)
    assert {one.dtype for one in narrow.parameters()} == {torch.float32, torch.bfloat16}
    async with running(narrow) as engine:
        await engine.swap(await engine.stage(weights_of(wide)), ServedWeights("r", 1, b""))
        result = (await complete(engine, [1, 2, 3], max_tokens=16))[0]
    assert result.difference({1: narrow}) < 0.2


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
