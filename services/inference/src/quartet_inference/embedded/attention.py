"""Attention whose result does not show the order of its sums.

1. Scores, softmax and weighted sum are computed in float64 and rounded to float32 once. So equal queries,
   keys and values give equal bits, in a decode step as in a prefill, and in a trainer that does the same.
2. `use` gives transformers' own models this attention; in other dtypes than float32 they keep sdpa.
3. At most WIDENED_ELEMENTS of keys, and as many of values, exist in float64 at a time, or those of one row.

Where a model hesitates between two keys, float32 scores alone move a log-probability by 1e-5
(docs/numerics.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "quartet_engine_float64"
#: 8 MiB of float64: what is widened is used before it leaves the cache of a core or its neighbours.
WIDENED_ELEMENTS = 1 << 20


def attend(q_BTKGD: Tensor, keys_BKCD: Tensor, values_BKCD: Tensor, mask_BMTC: Tensor) -> Tensor:
    """Attention of K groups of G heads over a context of C. [B * T, K * G * D].

    The mask is added to the scores; it is in float64. M is 1, or K at a decode step.
    """
    step = max(1, WIDENED_ELEMENTS // keys_BKCD[0].numel())
    tensors = (q_BTKGD, keys_BKCD, values_BKCD, mask_BMTC)
    if len(q_BTKGD) <= step:
        return _attend(*tensors)
    parts = [_attend(*part) for part in zip(*(torch.split(t, step) for t in tensors), strict=True)]
    return torch.cat(parts)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    rows, tokens, kv_heads, group, dim = q.shape
    context = keys.shape[2]
    q, keys, values = q.double(), keys.double(), values.double()
    if tokens == 1:  # the heads of a group become the query rows of their shared key head
        # Two batched products: on a CPU faster than its fused attention, which is made for long queries.
        folded = q.reshape(rows * kv_heads, group, dim)
        bias = mask.expand(rows, kv_heads, 1, context).reshape(rows * kv_heads, 1, context)
        scores = torch.baddbmm(bias, folded, keys.flatten(0, 1).transpose(1, 2), alpha=dim**-0.5)
        out = torch.bmm(torch.softmax(scores, -1), values.flatten(0, 1))
    else:
        q = q.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads * group, tokens, dim)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=group > 1)
        out = out.transpose(1, 2)
    return out.reshape(rows * tokens, kv_heads * group * dim).float()


def use(model: Any) -> None:
    """Let a transformers model that runs sdpa attention run this one."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


def hub_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers."""
    if query.dtype != torch.float32:
        plain, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
        return plain, None
    wide, _ = sdpa_attention_forward(module, query.double(), key.double(), value.double(), mask, **options)
    return wide.float(), None


AttentionInterface.register(NAME, hub_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
