"""The engine's float64 attention, and rows that do not change each other's bits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quartet_inference.embedded import attention, forward
from quartet_inference.embedded.hub import kv_shape
from quartet_inference.embedded.kv_cache import KvCache
from quartet_inference.embedded.lora import Bank
from quartet_inference.embedded.prefill import prefill
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, KV_HEADS, GROUP, CONTEXT, DIM = 3, 2, 3, 11, 8


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of the last tokens, keys with values, and the causal mask."""
    generator = torch.Generator().manual_seed(5)
    kv = 3 * torch.randn(ROWS, 2, KV_HEADS, CONTEXT, DIM, generator=generator)
    queries = 3 * torch.randn(ROWS, CONTEXT, KV_HEADS, GROUP, DIM, generator=generator)
    mask = torch.zeros(ROWS, 1, CONTEXT, CONTEXT, dtype=torch.float64)
    mask.masked_fill_(torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1), -torch.inf)
    return queries[:, -tokens:], kv, mask[:, :, -tokens:]


def exact(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    keys, values = kv.double().unbind(1)
    scores = torch.einsum("btkgd,bkcd->bkgtc", q.double(), keys) * DIM**-0.5 + mask[:, None]
    out = torch.einsum("bkgtc,bkcd->btkgd", scores.softmax(-1), values)
    return out.reshape(-1, KV_HEADS * GROUP * DIM)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("widened", [1, 1 << 20])
def test_attention_is_float64_rounded_once(
    tokens: int, widened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "WIDENED_ELEMENTS", widened)
    q, kv, mask = inputs(tokens)
    for held in (kv, kv.double()):  # as a small cache holds them (kv_cache.py 4)
        assert torch.equal(attention.attend(q, held, mask), exact(q, kv, mask).float())


def test_decode_step_prefill_and_hub_agree_in_bits() -> None:
    step, many = attention.attend(*inputs(1)), attention.attend(*inputs(4))
    assert torch.equal(step, many.view(ROWS, 4, -1)[:, -1])
    q, kv, mask = inputs(4)
    keys, values = kv.unbind(1)
    module: Any = SimpleNamespace(is_causal=True, num_key_value_groups=GROUP)
    query = q.flatten(2, 3).transpose(1, 2)
    hub, _ = attention.hub_attention(module, query, keys, values, mask)
    assert torch.equal(hub.flatten(2).flatten(0, 1), many)
    single = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask.float(), enable_gqa=True)
    assert not torch.equal(single.transpose(1, 2).reshape(many.shape), many), "or this shows nothing"


def test_bfloat16_models_keep_their_attention() -> None:
    q, kv, mask = inputs(4)
    keys, values = kv.unbind(1)
    module: Any = SimpleNamespace(is_causal=True, num_key_value_groups=GROUP)
    half = [tensor.bfloat16() for tensor in (q.flatten(2, 3).transpose(1, 2), keys, values, mask)]
    out, _ = attention.hub_attention(module, *half)
    assert out.dtype == torch.bfloat16


def test_a_row_alone_has_the_bits_that_it_has_among_others(make_model: Callable[..., Any]) -> None:
    """On the matrix library that these wheels come with: the order of its sums is its own."""
    model = make_model(0)
    generator = torch.Generator().manual_seed(6)
    prompts = torch.randint(0, 256, (8, 9), generator=generator).tolist()

    def logits(rows: int) -> Tensor:
        cache = KvCache(kv_shape(model), 8, 32, 1 << 24)
        cache.reserve(rows, 12)
        run = forward.choose(model, cache, Bank(0, 0))
        first = prefill(run, 0, prompts[:rows], [0] * rows)
        ids, positions = first.argmax(-1)[:, None], torch.full((rows, 1), 9)
        return torch.stack([first, run(0, ids, positions, 10, None)])

    with torch.inference_mode():
        together = logits(8)
        for rows in (1, 2, 3, 5):
            assert torch.equal(logits(rows), together[:, :rows]), rows


@pytest.mark.parametrize(("cap", "taken"), [(50.0, "eager"), (None, attention.NAME)])
def test_scores_that_are_capped_stay_capped(cap: float | None, taken: str) -> None:
    """As transformers 5.19 makes Gemma 2; newer releases refuse sdpa to it."""
    config = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    model.config.attn_logit_softcapping = cap
    attention.use(model)
    assert model.config._attn_implementation == taken
