"""Attention whose result does not show the order of its sums, for float32 on a CPU.

1. The forward pass is computed in float64 and rounded to float32 once. So equal queries, keys and values give
   equal bits however the row is packed or padded, and an engine that does the same gets them too.
2. The backward pass is that of float32 attention at the same queries, keys and values.
3. On other devices and in other dtypes it is transformers' sdpa attention.

Where a model hesitates between two keys, float32 scores alone move a log-probability by 1e-5
(docs/numerics.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_float64"


class _Instead(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, graded: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers."""
    if query.device.type != "cpu" or query.dtype != torch.float32:
        plain, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
        return plain, None
    with torch.no_grad():
        wide, _ = sdpa_attention_forward(
            module, query.double(), key.double(), value.double(), mask, **options
        )
        exact = wide.float()
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        graded, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
        exact = _Instead.apply(exact, graded)  # type: ignore[no-untyped-call]
    return exact, None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
