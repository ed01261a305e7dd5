"""What becomes of the ratio r: the policy-gradient loss of each token. A is its advantage, sg = no gradient.

cispo  -sg(clamp(r, clip_low, clip_high)) * A * log p
       CISPO, MiniMax-M1, arXiv 2506.13585. Defaults: clip_low 0, clip_high 4.
ppo    -min(r * A, clamp(r, 1 - clip_low, 1 + clip_high) * A)
       PPO, arXiv 1707.06347; unequal clips as in DAPO, arXiv 2503.14476. Both default to 0.2.
       With delta r is first bounded by it from above: INTELLECT-2, arXiv 2505.07291.
dppo   -r * A where sg(p - q) <= clip_high for A > 0 and sg(p - q) >= -clip_low for A <= 0, else 0
       p and q are the probabilities themselves: DPPO with binary total variation, arXiv 2602.04879.
       Both default to 0.2.
sapo   -4 / tau * sigmoid(tau * (r - 1)) * A, tau = tau_positive for A > 0, else tau_negative
       SAPO, arXiv 2511.20347: as PPO where r = 1, and its gradient fades as r leaves 1. 1 and 1.05.
vespo  -sg(r^k * exp(lambda * (1 - r))) * A * log p, r of whole samples, k and lambda by the sign of A
       VESPO, arXiv 2602.10693: 1 where r = 1, and fades on both sides of k / lambda. 2 and 3 for A > 0,
       else 3 and 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet_trainer.loss.tokens import Tokens
from quartet_trainer.spec import LossSpec, Ratio, VespoKernel


def treated(spec: LossSpec, tokens: Tokens, ratio_K: Tensor, advantages_K: Tensor) -> Tensor:
    """The loss of each token. ratio_K: with gradient."""
    low, high = spec.clip_bounds
    if spec.ratio is Ratio.CISPO:
        return -ratio_K.clamp(low, high).detach() * advantages_K * tokens.logp_K
    if spec.ratio is Ratio.DPPO:
        return torch.where(_moved_too_far(spec, tokens, advantages_K), 0.0, -ratio_K * advantages_K)
    if spec.ratio is Ratio.SAPO:
        positive, negative = spec.taus
        tau_K = torch.full_like(ratio_K, negative).masked_fill(advantages_K > 0, positive)
        return -4 / tau_K * torch.sigmoid(tau_K * (ratio_K - 1)) * advantages_K
    if spec.ratio is Ratio.VESPO:
        weight_K = _vespo_weights(spec.kernel or VespoKernel(), ratio_K.detach(), advantages_K > 0)
        return -weight_K * advantages_K * tokens.logp_K
    bounded_K = ratio_K if spec.delta is None else ratio_K.clamp(max=spec.delta)
    return -torch.minimum(bounded_K * advantages_K, ratio_K.clamp(low, high) * advantages_K)


def clipped(spec: LossSpec, tokens: Tokens, ratio_K: Tensor, advantages_K: Tensor) -> Tensor:
    """Tokens whose loss or gradient the clip changes: [K] of truth values."""
    low, high = spec.clip_bounds
    match spec.ratio:
        case Ratio.NONE | Ratio.SAPO | Ratio.VESPO:  # whose gate and kernel have no edge
            return torch.zeros_like(ratio_K, dtype=torch.bool)
        case Ratio.CISPO:
            return (ratio_K > high) | (ratio_K < low)
        case Ratio.DPPO:
            return _moved_too_far(spec, tokens, advantages_K)
        case Ratio.PPO:
            # Only the side that min() chooses acts.
            acts = ((advantages_K > 0) & (ratio_K > high)) | ((advantages_K < 0) & (ratio_K < low))
            return acts if spec.delta is None else acts | ((advantages_K < 0) & (ratio_K > spec.delta))


def _moved_too_far(spec: LossSpec, tokens: Tokens, advantages_K: Tensor) -> Tensor:
    low, high = spec.clip_bounds
    moved_K = tokens.logp_K.detach().exp() - tokens.compared_K.exp()
    return torch.where(advantages_K > 0, moved_K > high, moved_K < low)


def _vespo_weights(kernel: VespoKernel, ratio_K: Tensor, is_positive_K: Tensor) -> Tensor:
    positive, negative = (
        k * ratio_K.log() + slope * (1 - ratio_K)
        for k, slope in (
            (kernel.k_positive, kernel.lambda_positive),
            (kernel.k_negative, kernel.lambda_negative),
        )
    )
    return torch.where(is_positive_K, positive, negative).exp()
