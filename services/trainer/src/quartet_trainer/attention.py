"""Attention whose result does not show the order of its sums, for float32 on a CPU.

1. The forward pass is computed in float64 and rounded to float32 once. So equal queries, keys and values give
   equal bits however the row is packed or padded, and an engine that does the same gets them too.
2. The backward pass is computed in float32, with weights computed anew instead of kept.
3. It is causal. A block of queries is multiplied with the keys up to its last query only.
4. At most BLOCK_SCORES scores exist at a time, or those of one query.
5. On other devices, in other dtypes and with options that are not understood here it is transformers' sdpa
   attention.

Where a model hesitates between two keys, float32 scores alone move a log-probability by 1e-5
(docs/numerics.md).

Shapes: R rows, K key heads, P = R * K pairs of them, G query heads of a key head, L columns, D head size.
Within a block p of the pairs, q of the queries, k of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "quartet_trainer_float64"
#: 8 MiB of float64.
BLOCK_SCORES = 1 << 20
#: Fewer would waste less on keys that lie ahead, and make the products too small to be fast.
BLOCK_QUERIES = 64
#: What models pass besides mask and scale that leaves the result as it is: windows are in the mask already.
HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "sliding_window"})


def use(model: Any) -> None:
    """Let a causal transformers model that runs sdpa attention run this one."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


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
    """An attention function of transformers: [R, heads, L, D] in, [R, L, heads, D] out."""
    rows, heads, length, dim = query.shape
    understood = (
        query.device.type == "cpu"
        # Autocast may leave some of them wide: norms multiply by float32 masters.
        and query.dtype == key.dtype == value.dtype == torch.float32
        and dropout == 0
        # As transformers' own reads it: few models leave it out.
        and getattr(module, "is_causal", True)
        and (attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1))
        and key.shape[2] == length
        and all(given is None or name in HARMLESS for name, given in options.items())
    )
    if not understood:
        plain, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return plain, None
    pairs = rows * key.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1).expand(rows, -1, -1)
    if attention_mask is not None:
        hidden = hidden | ~attention_mask[:, 0]
    out = _Float64Attention.apply(  # type: ignore[no-untyped-call]
        query.reshape(pairs, -1, length, dim),
        key.reshape(pairs, length, dim),
        value.reshape(pairs, length, -1),
        hidden,
        dim**-0.5 if scaling is None else scaling,
    )
    return out.view(rows, heads, length, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _Float64Attention(torch.autograd.Function):
    """(q_PGLD, k_PLD, v_PLD, hidden_RLL, scale) -> out_PGLD. Hidden is what a query must not look at."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
        out = torch.empty(*q.shape[:3], v.shape[-1])
        for block in _blocks(q.shape):
            p_q, p_k = block.of_queries, block.of_keys
            weights = _weights(q[p_q].double(), k[p_k].double(), block.of_mask(hidden, len(q)), scale)
            out[p_q] = torch.bmm(weights.flatten(1, 2), v[p_k].double()).view_as(out[p_q])
        ctx.save_for_backward(q, k, v, hidden, out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, hidden, out = ctx.saved_tensors
        (d_out,) = gradients
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        along = (out * d_out).sum(-1, keepdim=True)
        for block in _blocks(q.shape):
            p_q, p_k = block.of_queries, block.of_keys
            weights = _weights(q[p_q], k[p_k], block.of_mask(hidden, len(q)), ctx.scale)
            d_part = d_out[p_q].flatten(1, 2)
            d_v[p_k].baddbmm_(weights.flatten(1, 2).transpose(1, 2), d_part)
            d_weights = torch.bmm(d_part, v[p_k].transpose(1, 2)).view_as(weights)
            d_scores = weights.mul_(d_weights.sub_(along[p_q])).flatten(1, 2)
            d_q[p_q] = torch.bmm(d_scores, k[p_k]).mul_(ctx.scale).view_as(d_q[p_q])
            d_k[p_k].baddbmm_(d_scores.transpose(1, 2), q[p_q].flatten(1, 2), alpha=ctx.scale)
        return d_q, d_k, d_v, None, None


class _Block(NamedTuple):
    pairs: slice
    queries: slice
    keys: slice

    @property
    def of_queries(self) -> tuple[slice, slice, slice]:
        return self.pairs, slice(None), self.queries

    @property
    def of_keys(self) -> tuple[slice, slice]:
        return self.pairs, self.keys

    def of_mask(self, hidden_RLL: Tensor, pairs: int) -> Tensor:
        row_p = torch.arange(self.pairs.start, self.pairs.stop) // (pairs // len(hidden_RLL))
        return hidden_RLL[:, self.queries, self.keys][row_p]


def _blocks(shape: torch.Size) -> Iterator[_Block]:
    pairs, group, length, _ = shape
    queries_each = max(1, min(length, BLOCK_QUERIES, BLOCK_SCORES // (group * length)))
    pairs_each = max(1, BLOCK_SCORES // (group * queries_each * length))
    for pair in range(0, pairs, pairs_each):
        for query in range(0, length, queries_each):
            end = min(length, query + queries_each)
            yield _Block(slice(pair, min(pairs, pair + pairs_each)), slice(query, end), slice(end))


def _weights(q_pGqD: Tensor, k_pkD: Tensor, hidden_pqk: Tensor, scale: float) -> Tensor:
    """Softmax of the scores: [p, G, q, k], in the dtype of the queries."""
    scores = torch.bmm(q_pGqD.flatten(1, 2), k_pkD.transpose(1, 2)).mul_(scale)
    scores = scores.view(*q_pGqD.shape[:3], k_pkD.shape[1])
    return torch.softmax(scores.masked_fill_(hidden_pqk[:, None], -torch.inf), -1)
