"""Attention masks of packed rows: what each position looks at, in each kind of layer.

1. A position sees what came before it in its sample, the shared prompt included, and nothing else.
2. In layers with a sliding window it sees the newest of these only, as many as the window is wide: counted in
   the sample, whatever lies between in the row.
3. Masks have the form that the model's attention takes: boolean, or for its eager attention what is added to
   scores.

A row without a mask is one sample, causal; transformers itself cuts its windows. In layers of other kinds
(linear attention, state spaces, chunks) no mask keeps samples apart: there every row is one sample.

Shapes: R rows, L columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quartet_trainer.packing import PROMPT

FULL, SLIDING = "full_attention", "sliding_attention"
#: How long rows that samples share become where nothing else is said: a mask costs the square.
MASKED_ROW_TOKENS = 256
#: The same where attention goes by segments. Longer ones save little, and are padded by more.
SEGMENTED_ROW_TOKENS = 1024


def kinds_of_layers(config: Any) -> set[str]:
    """What the layers of a model look at, in transformers' words."""
    text = config.get_text_config()
    # GPT-Neo has its own words for them, and cuts its windows in the row.
    named = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None)
    # Where transformers does not name them one by one, a window is one of all layers.
    return set(named or [SLIDING if _window(text) else FULL])


def shared_tokens(config: Any, row_tokens: int | None, by_segments: bool = False) -> int:
    """How long rows may be that several samples share: `row_tokens`, or no longer than one token.

    Where it is None, as suits the attention: `by_segments` is one that is given segments instead of a mask.
    """
    if not kinds_of_layers(config) <= {FULL, SLIDING}:
        return 1
    if row_tokens is None:
        return SEGMENTED_ROW_TOKENS if by_segments else MASKED_ROW_TOKENS
    return row_tokens


def attention_masks(config: Any, segments_RL: Tensor, positions_RL: Tensor) -> Tensor | dict[str, Tensor]:
    """The mask, or one for each kind of layer, as a model of this configuration takes them."""
    text, kinds = config.get_text_config(), kinds_of_layers(config)
    masks = {FULL: row_mask(segments_RL)}
    if SLIDING in kinds:
        window = _window(text)
        assert window is not None, "transformers itself needs it"
        near_RLL = positions_RL[:, None, :] > (positions_RL - window)[:, :, None]
        masks[SLIDING] = masks[FULL] & near_RLL[:, None]
    if text._attn_implementation == "eager":
        masks = {kind: _added(mask) for kind, mask in masks.items()}
    return _by_kind(text, kinds, masks)


def one_sample_masks(
    config: Any, rows: int, width: int, causal: Tensor, device: torch.device
) -> Tensor | dict[str, Tensor]:
    """The same where every row is one sample, as transformers itself would see it: `causal` stands for no
    mask but that."""
    text, kinds = config.get_text_config(), kinds_of_layers(config)
    masks, window = {FULL: causal}, _window(text)
    if SLIDING in kinds:
        assert window is not None, "transformers itself needs it"
        masks[SLIDING] = causal
        if width > window:
            near_LL = torch.ones(width, width, dtype=torch.bool, device=device).tril_().triu_(1 - window)
            masks[SLIDING] = near_LL.expand(rows, 1, -1, -1)
    return _by_kind(text, kinds, masks)


def _by_kind(text: Any, kinds: set[str], masks: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    if getattr(text, "layer_types", None) and SLIDING in kinds:
        return masks
    (kind,) = kinds
    return masks[kind]


def row_mask(segments_RL: Tensor) -> Tensor:
    """Boolean (R, 1, L, L): a position sees what came before it in its segment and in the shared prompt."""
    width = segments_RL.shape[1]
    causal_LL = torch.ones(width, width, dtype=torch.bool, device=segments_RL.device).tril()
    query_RL1, key_R1L = segments_RL[:, :, None], segments_RL[:, None, :]
    # Padding comes last and is a segment of its own: nothing reads it, and no row of the mask is empty.
    allowed_RLL = causal_LL & ((query_RL1 == key_R1L) | (key_R1L == PROMPT))
    return allowed_RLL[:, None]


@contextmanager
def narrowed(config: Any, window: int) -> Iterator[None]:
    """Windows are so wide inside, where there are any."""
    text = config.get_text_config()
    wide = _window(text)
    if wide is None:
        yield
        return
    text.sliding_window = window
    try:
        yield
    finally:
        text.sliding_window = wide


def _window(text: Any) -> int | None:
    window: int | None = getattr(text, "sliding_window", None)
    return window


def _added(mask: Tensor) -> Tensor:
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, torch.finfo(torch.float32).min)
