"""Attention over the rows of the KV cache, and over whole sequences in transformers' models.

1. In float32 on a CPU its result does not show the order of its sums: scores, softmax and weighted sum are
   computed in float64 and rounded to float32 once. So equal queries, keys and values give equal bits, in a
   decode step as in a prefill, and in a trainer that does the same.
2. `use` gives transformers' own models this attention.
3. At most WIDENED_ELEMENTS of keys and values are widened at a time, or those of one row; none of those that
   are float64 already (kv_cache.py 4).
4. In other dtypes and on other devices it is PyTorch's kernels', which sum in float32, as a trainer's there.
   Where there is an engine these are never cuDNN's, which PyTorch takes first on Hopper and Blackwell: it
   builds a plan, in some 45 ms on an H100, for every number of rows and every context, and keeps them all.

Where a model hesitates between two keys, float32 scores alone move a log-probability by 1e-5
(docs/numerics.md).

Shapes: B rows, T tokens, C context, K key heads, G query heads of a key head, D head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "quartet_engine_float64"
#: 4 MiB of float64: what is widened is used before it leaves the caches, and few parts cost few calls.
WIDENED_ELEMENTS = 1 << 19
#: Kernels copy a mask, in every layer, whose rows do not begin at multiples of so many elements.
MASK_ALIGNMENT = 16


def mask_of(seen_B1TC: Tensor, dtype: torch.dtype, group: int) -> Tensor:
    """What `attend` adds to the scores of queries of this type, so that they see these positions alone."""
    if is_exact(seen_B1TC.device, dtype):
        return torch.zeros(seen_B1TC.shape, dtype=torch.float64).masked_fill_(~seen_B1TC, -torch.inf)
    rows, _, tokens, context = seen_B1TC.shape
    width = -(-context // MASK_ALIGNMENT) * MASK_ALIGNMENT
    mask = torch.zeros(rows, 1, group, tokens, width, dtype=dtype, device=seen_B1TC.device)
    mask = mask[..., :context].masked_fill_(~seen_B1TC[:, :, None], -torch.inf)
    return mask.flatten(2, 3)


def attend(q_BTKGD: Tensor, kv_B2KCD: Tensor, mask: Tensor) -> Tensor:
    """Attention of K groups of G heads over the keys and values of a context: [B * T, K * G * D].

    The mask is that of `mask_of`.
    """
    if not is_exact(q_BTKGD.device, q_BTKGD.dtype):
        return _attend_by_kernel(q_BTKGD, kv_B2KCD, mask)
    one = _attend_step if q_BTKGD.shape[1] == 1 else _attend
    step = max(1, WIDENED_ELEMENTS // kv_B2KCD[0].numel())
    tensors = (q_BTKGD, kv_B2KCD, mask)
    if kv_B2KCD.dtype == torch.float64 or len(q_BTKGD) <= step:
        return one(*tensors)
    parts = [one(*part) for part in zip(*(torch.split(t, step) for t in tensors), strict=True)]
    return torch.cat(parts)


def _attend(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    rows, tokens, kv_heads, group, dim = q.shape
    q = q.double().permute(0, 2, 3, 1, 4).reshape(rows, kv_heads * group, tokens, dim)
    keys, values = kv.double().unbind(1)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=group > 1)
    return out.transpose(1, 2).reshape(rows * tokens, kv_heads * group * dim).float()


def _attend_step(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    """One token of each row: the heads of a group are the query rows of their shared key head.

    In NumPy many small products cost a third of what they cost in PyTorch, and exp half.
    """
    rows, _, kv_heads, group, dim = q.shape
    queries = q[:, 0].double().mul_(dim**-0.5).numpy()
    wide = kv.double().numpy()
    with np.errstate(all="ignore"):  # what is not finite shows in the log-probabilities
        scores = np.matmul(queries, wide[:, 0].swapaxes(-1, -2))
        weights = torch.from_numpy(scores).add_(mask)
        weights.sub_(weights.amax(-1, keepdim=True))
        np.exp(scores, out=scores)
        out = torch.from_numpy(np.matmul(scores, wide[:, 1]))
    return out.div_(weights.sum(-1, keepdim=True)).reshape(rows, kv_heads * group * dim).float()


def _attend_by_kernel(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    """The heads of a group are queries of their shared key head: kernels that take a mask take no groups."""
    rows, tokens, kv_heads, group, dim = q.shape
    q = q.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * tokens, dim)
    keys, values = kv.unbind(1)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    return out.view(rows, kv_heads, group, tokens, dim).permute(0, 3, 1, 2, 4).reshape(rows * tokens, -1)


def is_exact(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it is computed in float64."""
    return device.type == "cpu" and dtype == torch.float32


def use(model: Any) -> None:
    """Let a transformers model that runs sdpa attention run this one, and this process do without cuDNN's.

    Where scores are capped (Gemma 2), which sdpa leaves out, transformers' eager one; newer releases choose
    that by themselves.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if model.config._attn_implementation == "sdpa":
        capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
        model.set_attn_implementation("eager" if capped else NAME)


def hub_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers, whose models give the mask by position or by this name."""
    if not is_exact(query.device, query.dtype):
        plain, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return plain, None
    q, k, v = query.double(), key.double(), value.double()
    # What is added to scores, as a few models make of the mask themselves.
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.double()
    wide, _ = sdpa_attention_forward(module, q, k, v, attention_mask, **options)
    return wide.float(), None


AttentionInterface.register(NAME, hub_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
