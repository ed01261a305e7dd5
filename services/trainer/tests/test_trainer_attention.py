"""The trainer's float64 attention: its value, its gradient, and that its bits do not show the layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quartet_trainer import attention, tiles
from quartet_trainer.masks import row_mask
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

HEADS, KV_HEADS, DIM = 6, 2, 8
MODULE: Any = SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // KV_HEADS)


def inputs(rows: int, length: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values, sharp enough that attention has to choose."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(rows, heads, length, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [(3 * torch.randn(size, generator=generator)).to(dtype).requires_grad_() for size in sizes]


def segments_of(rows: int, length: int) -> Tensor:
    """Rows of a prompt, two tails and padding, as the attention takes them."""
    segments = torch.zeros(rows, 1, 1, length, dtype=torch.long)
    for row in range(rows):
        segments[row, ..., 3 + row :], segments[row, ..., 6 + row :] = 1, 2
    segments[..., length - 2 :] = -1
    return segments


def mask_of(rows: int, length: int) -> Tensor:
    return row_mask(segments_of(rows, length)[:, 0, 0])


def window_of(rows: int, length: int, width: int) -> Tensor:
    """Neither the first key nor any other is seen by all."""
    return torch.ones(length, length, dtype=torch.bool).tril().triu(1 - width).expand(rows, 1, -1, -1)


# What is given, the mask that says the same, and the columns that are no padding.
GIVEN = {
    "none": (None, None, 13),
    "mask": (mask_of(3, 13), mask_of(3, 13), 11),
    "window": (window_of(3, 13, 4), window_of(3, 13, 4), 13),
    "segments": (segments_of(3, 13), mask_of(3, 13), 11),
}


def reference(tensors: list[Tensor], mask: Tensor | None) -> Tensor:
    out, _ = sdpa_attention_forward(MODULE, *[t.double() for t in tensors], mask)
    return out


@pytest.fixture(params=[(1 << 20, 64), (40, 64), (1 << 20, 3), (1, 1)], ids=str)
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, queries = request.param
    monkeypatch.setattr(attention, "TILE_SCORES", scores)
    monkeypatch.setattr(tiles, "PIECE_QUERIES", queries)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(("given", "mask", "columns"), GIVEN.values(), ids=GIVEN)
def test_value_is_float64_rounded_once_and_gradient_is_right(
    given: Tensor | None, mask: Tensor | None, columns: int
) -> None:
    tensors = inputs(3, 13)
    out, _ = attention.attention(MODULE, *tensors, given)
    exact = reference(tensors, mask)
    assert torch.equal(out[:, :columns], exact[:, :columns].float()) and out.isfinite().all()
    direction = torch.randn(out[:, :columns].shape, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad(out[:, :columns], tensors, direction)
    theirs = torch.autograd.grad(exact[:, :columns], tensors, direction.double())
    for got, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_bits_do_not_depend_on_the_layout_of_a_row() -> None:
    """A tail behind a shared prompt and another tail, and the same sequence alone."""
    prompt, first, second = 5, 4, 3
    shared = inputs(2, prompt + first + second, seed=2)
    segments = torch.tensor([[0] * prompt + [1] * first + [2] * second] * 2)
    packed, _ = attention.attention(MODULE, *shared, segments[:, None, None])
    masked, _ = attention.attention(MODULE, *shared, row_mask(segments))
    assert torch.equal(packed, masked)
    chosen = [*range(prompt), *range(prompt + first, prompt + first + second)]
    alone, _ = attention.attention(MODULE, *[t[:1, :, chosen] for t in shared], None)
    assert torch.equal(packed[:1, chosen], alone)
    plain, _ = sdpa_attention_forward(MODULE, *shared, row_mask(segments))
    assert not torch.equal(plain, packed), "float32 attention rounds otherwise, or this shows nothing"


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"position_bias": torch.ones(1, HEADS, 9, 9)}])
def test_what_it_does_not_understand_is_left_to_sdpa(options: dict[str, Any]) -> None:
    tensors = inputs(2, 9)
    torch.manual_seed(3)
    mine, _ = attention.attention(MODULE, *tensors, None, **options)
    torch.manual_seed(3)
    theirs, _ = sdpa_attention_forward(MODULE, *tensors, None, **options)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("given", [mask_of(2, 9), segments_of(2, 9)], ids=["mask", "segments"])
def test_bfloat16_is_left_to_sdpa(given: Tensor) -> None:
    tensors = inputs(2, 9, dtype=torch.bfloat16)
    mine, _ = attention.attention(MODULE, *tensors, given)
    theirs, _ = sdpa_attention_forward(MODULE, *tensors, mask_of(2, 9))
    assert mine.dtype == torch.bfloat16
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("cap", "taken"), [(50.0, "eager"), (None, attention.NAME)])
def test_scores_that_are_capped_stay_capped(cap: float | None, taken: str) -> None:
    """As transformers 5.19 makes Gemma 2; newer releases refuse sdpa to it."""
    config = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    model.config.attn_logit_softcapping = cap
    attention.use(model)
    assert model.config._attn_implementation == taken
