"""Attention whose result does not show the order of its sums, for float32 on a CPU.

1. The forward pass is computed in float64 and rounded to float32 once. So equal queries, keys and values give
   equal bits however the row is packed or padded, and an engine that does the same gets them too.
2. The backward pass is computed in float32, with weights computed anew instead of kept.
3. It is causal, and where it is given segments instead of a mask it computes little else than what they let
   see (tiles.py).
4. At most TILE_SCORES scores exist at a time, or those of PIECE_QUERIES queries (tiles.py).
5. On other devices, in other dtypes and with options that are not understood here it is transformers' sdpa
   attention. `use` leaves that to models whose layers choose what they look at (DeepSeek-V3.2, GLM-5): the
   rest they hide from transformers' own attention alone, which they know by its name.

Where a model hesitates between two keys, float32 scores alone move a log-probability by 1e-5
(docs/numerics.md).

Shapes: R rows, L columns, T = R * L positions, K key heads, G query heads of a key head, D head size. Within
a tile N pieces, Q queries and k keys of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from quartet_trainer.masks import FULL, SLIDING, kinds_of_layers, row_mask
from quartet_trainer.tiles import Tile, tiles_of

NAME = "quartet_trainer_float64"
#: 8 MiB of float64.
TILE_SCORES = 1 << 20
#: Kinds of layers whose attention sees all that its mask lets it see, or that have none, in the words of
#: transformers, today's and those of earlier releases.
SEEING_ALL = frozenset(
    {
        *(FULL, SLIDING, "chunked_attention", "hybrid", "hybrid_sliding", "attention"),
        *("conv", "linear_attention", "mamba", "moe"),
    }
)
#: What models pass besides mask and scale that leaves the result as it is: windows are in the mask already.
HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "sliding_window"})


def use(model: Any) -> None:
    """Let a causal transformers model that runs sdpa attention run this one.

    Where scores are capped (Gemma 2), which sdpa leaves out, transformers' eager one; newer releases choose
    that by themselves.
    """
    if model.config._attn_implementation == "sdpa" and kinds_of_layers(model.config) <= SEEING_ALL:
        capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
        model.set_attn_implementation("eager" if capped else NAME)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: [R, heads, L, D] in, [R, L, heads, D] out.

    The mask is boolean [R, 1, L, L], or the segments of the rows, [R, 1, 1, L] in integers.
    """
    rows, heads, length, dim = query.shape
    mask, segments = attention_mask, None
    if attention_mask is not None and attention_mask.dtype == torch.long:
        mask, segments = None, attention_mask[:, 0, 0]
    understood = (
        query.device.type == "cpu"
        # Autocast may leave some of them wide: norms multiply by float32 masters.
        and query.dtype == key.dtype == value.dtype == torch.float32
        and dropout == 0
        # As transformers' own reads it: few models leave it out.
        and getattr(module, "is_causal", True)
        and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
        and key.shape[2] == length
        and all(given is None or name in HARMLESS for name, given in options.items())
    )
    if not understood:
        if segments is not None:
            mask = row_mask(segments)
        plain, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **options
        )
        return plain, None
    if segments is None:
        segments = torch.zeros(rows, length, dtype=torch.long)
    kv_heads = key.shape[1]
    q_TKGD, k_TK1D, v_TK1D = (
        x.transpose(1, 2).reshape(rows * length, kv_heads, -1, x.shape[-1]) for x in (query, key, value)
    )
    # What fills a tile up sees as the tile says.
    mask_TL = None if mask is None else F.pad(mask.reshape(-1, length), (0, 0, 0, 1), value=True)
    out_TKGD = _Float64Attention.apply(  # type: ignore[no-untyped-call]
        q_TKGD,
        k_TK1D,
        v_TK1D,
        tiles_of(segments, TILE_SCORES // heads),
        mask_TL,
        dim**-0.5 if scaling is None else scaling,
    )
    return out_TKGD.view(rows, length, heads, -1), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _Float64Attention(torch.autograd.Function):
    """(q_TKGD, k_TK1D, v_TK1D, tiles, mask_TL, scale) -> out_TKGD. A mask hides more than the tiles do."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...], mask: Tensor | None, scale: float
    ) -> Tensor:
        out = _with_filling((*q.shape[:3], v.shape[-1]))
        for tile in tiles:
            queries, keys = tile.queries_NQ, tile.keys_NK
            powers, total = _softmax(
                _pieces(q, queries).double(), _pieces(k, keys).double(), tile, mask, scale
            )
            found = _product(powers, _pieces(v, keys).double()).div_(total).float()
            out.index_copy_(0, queries.flatten(), _positions(found, queries, out))
        ctx.save_for_backward(q, k, v, mask, out)
        ctx.tiles, ctx.scale = tiles, scale
        return out[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out = ctx.saved_tensors
        # Queries that fill a tile up have no gradient.
        d_out = F.pad(gradients[0], (0, 0) * 3 + (0, 1))
        d_q, d_k, d_v = _with_filling(q.shape), _with_filling(k.shape), _with_filling(v.shape)
        along = (out * d_out).sum(-1, keepdim=True)
        for tile in ctx.tiles:
            queries, keys = tile.queries_NQ, tile.keys_NK
            q_p, k_p, d_p = _pieces(q, queries), _pieces(k, keys), _pieces(d_out, queries)
            powers, total = _softmax(q_p, k_p, tile, mask, ctx.scale)
            weights = powers.div_(total)
            d_v_p = _product(weights.transpose(1, 2), d_p)
            d_weights = _product(d_p, _pieces(v, keys).transpose(1, 2))
            d_scores = weights.mul_(d_weights.sub_(_pieces(along, queries))).mul_(ctx.scale)
            d_q.index_copy_(0, queries.flatten(), _positions(_product(d_scores, k_p), queries, q))
            d_k.index_add_(0, keys.flatten(), _positions(_product(d_scores.transpose(1, 2), q_p), keys, k))
            d_v.index_add_(0, keys.flatten(), _positions(d_v_p, keys, v))
        return d_q[:-1], d_k[:-1], d_v[:-1], None, None, None


def _with_filling(shape: Sequence[int]) -> Tensor:
    """Zeros for every position, and a last one for what fills tiles up.

    Padding stays zero: nobody reads it, but it must be a number.
    """
    return torch.zeros(shape[0] + 1, *shape[1:])


def _pieces(x_TKGD: Tensor, positions_NP: Tensor) -> Tensor:
    """[N * K, G * P, D]: of each key head the heads of its group, one after the other."""
    taken = x_TKGD.index_select(0, positions_NP.flatten().clamp(max=len(x_TKGD) - 1))
    heads, group, dim = x_TKGD.shape[1:]
    return (
        taken.view(*positions_NP.shape, heads, group, dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(-1, group * positions_NP.shape[1], dim)
    )


def _positions(x: Tensor, positions_NP: Tensor, like_TKGD: Tensor) -> Tensor:
    """[N * P, K, G, D]: what `_pieces` does, undone."""
    (pieces, count), (heads, group) = positions_NP.shape, like_TKGD.shape[1:3]
    return (
        x.view(pieces, heads, group, count, -1)
        .permute(0, 3, 1, 2, 4)
        .reshape(pieces * count, heads, group, -1)
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Many small products: in NumPy they cost a third to two thirds of what they cost in PyTorch."""
    with np.errstate(all="ignore"):  # what is not finite shows in the loss
        return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))


def _softmax(q: Tensor, k: Tensor, tile: Tile, mask_TL: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """([N * K, G * Q, k], [N * K, G * Q, 1]): numerators and denominators, in the dtype of the queries."""
    hidden_NQk = tile.hidden_NQK
    if mask_TL is not None:
        seen = mask_TL[tile.queries_NQ[:, :, None], tile.keys_NK[:, None] % mask_TL.shape[1]]
        hidden_NQk = hidden_NQk | ~seen
    scores = _product(q * scale, k.transpose(1, 2))
    pieces, count, keys = hidden_NQk.shape
    scores.view(pieces, -1, count, keys).masked_fill_(hidden_NQk[:, None], -torch.inf)
    scores.sub_(scores.amax(-1, keepdim=True))
    np.exp(scores.numpy(), out=scores.numpy())  # half of torch's time
    return scores, scores.sum(-1, keepdim=True)
