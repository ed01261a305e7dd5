"""transformers' own code of a model over the rows of the KV cache, and what that keeps of a token.

1. Any model serves that takes positions and a mask of its own, and keeps the keys and values of each layer
   and nothing else; probe.py compares what it then computes with a plain forward pass.
2. The mask has the form that the model's attention takes: boolean, or for its eager attention what is added
   to scores.

Shapes: B rows, T tokens, C context, K key heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers.cache_utils import Cache

from quartet_inference.embedded.kv_cache import KvCache, KvShape
from quartet_inference.embedded.lora import Bank

#: What transformers' code raises where it takes something else than a mask, positions, or this cache.
UNSERVED = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
#: Under which name a model takes a cache: another one since 5.24, and that alone from 5.40 on.
CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


def causal_mask(positions_BT: Tensor, context: int) -> Tensor:
    """True where a token may look: [B, 1, T, context]."""
    return torch.arange(context, device=positions_BT.device) <= positions_BT[:, None, :, None]


def _mask_for(model: Any, seen: Tensor) -> Tensor:
    """The mask as the model's attention takes it."""
    if model.config.get_text_config()._attn_implementation != "eager":
        return seen
    dtype = next(model.parameters()).dtype
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


class HubForward:
    """Any causal decoder of transformers."""

    def __init__(self, model: Any, cache: KvCache, bank: Bank) -> None:
        self._model = model
        self._cache = cache
        self._bank = bank

    def __call__(
        self, first_row: int, ids_BT: Tensor, positions_BT: Tensor, context: int, last_B: Tensor | None
    ) -> Tensor:
        rows = len(ids_BT)
        device = self._cache.shape.device
        # Those of prompts come from the CPU.
        ids_BT, positions_BT = ids_BT.to(device), positions_BT.to(device)
        kept: Any = 1  # so many of the last
        chosen: Any = (slice(None), -1)
        if last_B is not None:
            # Copied before the pass: a copy waits for all that the device was given before.
            kept, where_B = (one.to(device) for one in torch.unique(last_B, return_inverse=True))
            chosen = (torch.arange(rows, device=device), where_B)
        with self._bank.active(self._bank.plan(first_row, rows)):
            out = self._model(
                input_ids=ids_BT,
                attention_mask=_mask_for(self._model, causal_mask(positions_BT, context)),
                position_ids=positions_BT,
                use_cache=True,
                logits_to_keep=kept,
                **{CACHE: _RowsCache(self._cache, first_row, positions_BT, context)},
            )
        logits: Tensor = out.logits[chosen]
        return logits.float()


class _RowsCache(Cache):
    """A range of cache rows in the shape that transformers' attention expects."""

    def __init__(self, cache: KvCache, first_row: int, positions_BT: Tensor, context: int) -> None:
        super().__init__(layers=[])
        self._held = cache.data[:, first_row : first_row + positions_BT.shape[0], ..., :context, :]
        self._index = positions_BT[:, None, :, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self._put(layer_idx, 0, key_states), self._put(layer_idx, 1, value_states)

    def _put(self, layer: int, part: int, new_BKTD: Tensor) -> Tensor:
        _, heads, _, dim = new_BKTD.shape
        held_BKCD = self._held[layer, :, part, :heads, :, :dim]
        return held_BKCD.scatter_(2, self._index.expand(-1, heads, -1, dim), new_BKTD)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _Shapes(Cache):
    """Notes what a model would have kept."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen: dict[int, list[torch.Size]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.seen[layer_idx] = [key_states.shape, value_states.shape]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def kv_shape(model: Any) -> KvShape:
    """What the model keeps of a token: configurations do not say so in one way. Errors: ValueError.

    Where layers, or keys and values, have other sizes, the largest of them.
    """
    weight = next(model.parameters())
    shapes, positions = _Shapes(), torch.zeros(1, 1, dtype=torch.long, device=weight.device)
    name = type(model).__name__
    try:
        with torch.inference_mode():
            model(
                input_ids=positions,
                position_ids=positions,
                attention_mask=_mask_for(model, causal_mask(positions, 1)),
                use_cache=True,
                **{CACHE: shapes},
            )
    except UNSERVED as error:
        raise ValueError(not_decoded(name, error)) from error
    sizes = [size for pair in shapes.seen.values() for size in pair]
    if not sizes or any(len(size) != 4 for size in sizes):
        raise ValueError(not_decoded(name))
    return KvShape(
        layers=max(shapes.seen) + 1,
        kv_heads=max(size[1] for size in sizes),
        head_dim=max(size[3] for size in sizes),
        dtype=weight.dtype,
        device=weight.device,
    )


def not_decoded(name: str, error: Exception | None = None) -> str:
    """Why transformers' code of a model, which has its own ways, serves no rows."""
    why = f" ({type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]})" if error else ""
    return (
        f"{name} does not decode with positions, a mask, and the keys and values of each layer alone{why}; "
        "use engine vllm if it knows the model, or another model"
    )
