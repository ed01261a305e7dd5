"""The output layer as one function from hidden states to log-probabilities and entropies, which never holds
tokens x vocabulary.

1. Forward and backward pass compute the logits of a chunk of tokens at a time; the backward pass computes
   them anew. Besides its inputs it keeps one number for each token.
2. Logits are float32, and so are the sums that they come from, whatever the dtype of both factors: bfloat16
   would round a logit of 20 to a multiple of an eighth. The engines do so, too.
3. The values are those of log_softmax, bit for bit, however the tokens are cut into chunks of 2 or more rows
   (docs/numerics.md says why 2).
4. Both results are differentiable; the entropy costs nothing in the backward pass where nobody asks for its
   gradient.

Where logits are capped, l = cap * tanh(products / cap), and dl / dproducts = 1 - (l / cap)^2.
With z = logits / temperature, p = softmax(z), H = -sum p log p, y the target:
  d log p_y / dz = 1[y] - p          dH / dz = -p * (log p + H)

Shapes: K covered positions, H hidden, V vocabulary; k positions of a chunk.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quartet_trainer.products import add_weight_gradient, linear, wide_linear

#: What is told beside log p: the entropy in nats, or whether the target is the most likely token, 1 or 0,
#: from which nothing learns.
Measure = Literal["entropy", "best"]


def chunked_logprobs(
    hidden_KH: Tensor,
    weight_VH: Tensor,
    targets_K: Tensor,
    temperature: float,
    chunk: int,
    cap: float | None = None,
    measure: Measure = "entropy",
) -> tuple[Tensor, Tensor]:
    """(log p of each target, what is measured), `chunk` positions at a time."""
    assert measure == "entropy" or not torch.is_grad_enabled()
    device = hidden_KH.device.type
    if torch.is_autocast_enabled(device):
        # Inside the function autocast would cast the whole matrix again for every chunk.
        dtype = torch.get_autocast_dtype(device)
        hidden_KH, weight_VH = hidden_KH.to(dtype), weight_VH.to(dtype)
    with torch.autocast(device, enabled=False):
        return _ChunkedLogprobs.apply(hidden_KH, weight_VH, targets_K, temperature, chunk, cap, measure)  # type: ignore[no-any-return,no-untyped-call]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: Tensor,
        weight_VH: Tensor,
        targets_K: Tensor,
        temperature: float,
        chunk: int,
        cap: float | None,
        measure: Measure,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logp_K = torch.empty(len(hidden_KH), device=hidden_KH.device)
        measured_K = torch.empty_like(logp_K)
        for part in _parts(len(hidden_KH), chunk):
            logp_kV, _ = _log_softmax(hidden_KH[part], weight_VH, temperature, cap)
            logp_K[part] = logp_kV.gather(1, targets_K[part, None]).squeeze(1)
            best = measure == "best"
            measured_K[part] = is_best(logp_kV, targets_K[part]) if best else _entropy(logp_kV)
        ctx.save_for_backward(hidden_KH, weight_VH, targets_K, measured_K)
        ctx.temperature, ctx.chunk, ctx.cap = temperature, chunk, cap
        return logp_K, measured_K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_KH, weight_VH, targets_K, entropy_K = ctx.saved_tensors
        d_logp_K, d_entropy_K = gradients
        if d_logp_K is None and d_entropy_K is None:
            return None, None, None, None, None, None, None
        d_hidden_KH = torch.empty_like(hidden_KH) if ctx.needs_input_grad[0] else None
        # Summed over chunks in float32 whatever the products are computed in.
        d_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _parts(len(hidden_KH), ctx.chunk):
            logp_kV, slope_kV = _log_softmax(hidden_KH[part], weight_VH, ctx.temperature, ctx.cap)
            d_logits_kV = _logit_gradients(
                logp_kV,
                targets_K[part],
                None if d_logp_K is None else d_logp_K[part],
                None if d_entropy_K is None else (d_entropy_K[part], entropy_K[part]),
            )
            if ctx.temperature != 1.0:
                d_logits_kV = d_logits_kV.div_(ctx.temperature)
            if slope_kV is not None:
                d_logits_kV = d_logits_kV.mul_(slope_kV)
            d_logits_kV = d_logits_kV.to(weight_VH.dtype)
            if d_hidden_KH is not None:
                d_hidden_KH[part] = linear(d_logits_kV, weight_VH.t())
            if d_weight_VH is not None:
                add_weight_gradient(d_weight_VH, d_logits_kV, hidden_KH[part])
        return (
            d_hidden_KH,
            None if d_weight_VH is None else d_weight_VH.to(weight_VH.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _parts(count: int, chunk: int) -> list[slice]:
    """Slices of nearly equal size, at most `chunk`."""
    pieces = max(1, -(-count // chunk))
    size = max(1, -(-count // pieces))
    return [slice(start, min(count, start + size)) for start in range(0, count, size)]


def capped(products: Tensor, cap: float | None) -> Tensor:
    """Logits of what the output layer gives."""
    return products if cap is None else torch.tanh(products / cap) * cap


def _log_softmax(
    hidden_kH: Tensor, weight_VH: Tensor, temperature: float, cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """(log p, slope of the logits over the products; None: 1 everywhere)."""
    logits_kV = capped(wide_linear(hidden_kH, weight_VH), cap)
    slope_kV = None if cap is None else 1.0 - (logits_kV / cap).square_()
    if temperature != 1.0:
        logits_kV = logits_kV / temperature
    return torch.log_softmax(logits_kV, dim=-1), slope_kV


def is_best(logp_kV: Tensor, targets_k: Tensor) -> Tensor:
    """1 where the target is the most likely token, the first of those that are; else 0."""
    return (logp_kV.argmax(-1) == targets_k).to(logp_kV.dtype)


def _entropy(logp_kV: Tensor) -> Tensor:
    return -logp_kV.exp().mul_(logp_kV).sum(-1)


def _logit_gradients(
    logp_kV: Tensor, targets_k: Tensor, d_logp_k: Tensor | None, of_entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradient of the scaled logits, in the memory of logp_kV. of_entropy: (its gradient, its value)."""
    if of_entropy is None:
        assert d_logp_k is not None
        total_kV = logp_kV.exp_().mul_(-d_logp_k[:, None])
    else:
        d_entropy_k, entropy_k = of_entropy
        p_kV = logp_kV.exp()
        # -p * (d_logp + d_entropy * (log p + H))
        total_kV = logp_kV.add_(entropy_k[:, None]).mul_(d_entropy_k[:, None])
        if d_logp_k is not None:
            total_kV.add_(d_logp_k[:, None])
        total_kV.mul_(p_kV).neg_()
    if d_logp_k is not None:
        total_kV[torch.arange(len(targets_k), device=targets_k.device), targets_k] += d_logp_k
    return total_kV
