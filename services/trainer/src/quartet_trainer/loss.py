"""The losses, as sums over covered tokens, and what is worth knowing about them.

With r = exp(log p - log q), p the trainer's and q the sampler's probability of a token at the sampling
temperature, A its advantage, sg = no gradient:

  cispo          -sg(clamp(r, clip_low, clip_high)) * A * log p
                 CISPO, MiniMax-M1, arXiv 2506.13585. Defaults: clip_low 0, clip_high 4.
  ppo            -min(r * A, clamp(r, 1 - clip_low, 1 + clip_high) * A)
                 PPO, arXiv 1707.06347; unequal clips as in DAPO, arXiv 2503.14476. Both default to 0.2.
  none           -A * log p
                 REINFORCE, without correction.
  cross_entropy  -w * log p
                 w = advantages where given, else 1.

The caller divides by the normalizer of the batch; there is no other averaging.

Diagnostics are means over covered tokens, except for the maxima. "mismatch_kl" is the k3 estimate of
KL(q || p), r - 1 - log r, which is never negative (Schulman, Approximating KL Divergence, 2020).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quartet_trainer.spec import LossSpec, Ratio

CISPO_CLIP_HIGH = 4.0
PPO_CLIP = 0.2
#: |log r| is cut here so that one token with a vanished probability cannot make a batch infinite. e^20 lies
#: far past every clip.
LOG_RATIO_BOUND = 20.0


def token_losses(spec: LossSpec, logp_K: Tensor, sampled_logp_K: Tensor | None, weights_K: Tensor) -> Tensor:
    """The loss of each covered token. sampled_logp_K may be missing only where the loss has no ratio."""
    if spec.ratio in (Ratio.NONE, Ratio.CROSS_ENTROPY):
        return -weights_K * logp_K
    assert sampled_logp_K is not None, "checked at the border"
    ratio_K = _log_ratio(logp_K, sampled_logp_K).exp()
    low, high = clip_bounds(spec)
    clipped_K = ratio_K.clamp(low, high)
    if spec.ratio is Ratio.CISPO:
        return -clipped_K.detach() * weights_K * logp_K
    return -torch.minimum(ratio_K * weights_K, clipped_K * weights_K)


def clip_bounds(spec: LossSpec) -> tuple[float, float]:
    """The interval that the ratio is clamped to."""
    if spec.ratio is Ratio.CISPO:
        return spec.clip_low or 0.0, CISPO_CLIP_HIGH if spec.clip_high is None else spec.clip_high
    if spec.ratio is Ratio.PPO:
        low = PPO_CLIP if spec.clip_low is None else spec.clip_low
        high = PPO_CLIP if spec.clip_high is None else spec.clip_high
        return 1.0 - low, 1.0 + high
    return 0.0, math.inf


def diagnostics(
    spec: LossSpec, logp_K: Tensor, sampled_logp_K: Tensor | None, weights_K: Tensor, entropy_K: Tensor
) -> dict[str, float]:
    """Values by name over all covered tokens of a call; all inputs without gradient."""
    values = {"entropy": _mean(entropy_K), "logprob_mean": _mean(logp_K)}
    if sampled_logp_K is None:
        return values
    log_ratio_K = _log_ratio(logp_K, sampled_logp_K)
    ratio_K = log_ratio_K.exp()
    difference_K = (logp_K - sampled_logp_K).abs()
    return values | {
        "ratio_max": float(ratio_K.max()),
        "ratio_mean": _mean(ratio_K),
        "clipped_fraction": _mean(_clipped(spec, ratio_K, weights_K)),
        # expm1 keeps the digits that r - 1 would lose near r = 1.
        "mismatch_kl": _mean(torch.expm1(log_ratio_K.double()) - log_ratio_K.double()),
        "logprob_difference_mean": _mean(difference_K),
        "logprob_difference_max": float(difference_K.max()),
    }


def _clipped(spec: LossSpec, ratio_K: Tensor, weights_K: Tensor) -> Tensor:
    """Tokens whose loss the clip changes."""
    low, high = clip_bounds(spec)
    if spec.ratio is Ratio.PPO:
        # Only the side that min() chooses acts.
        return ((weights_K > 0) & (ratio_K > high)) | ((weights_K < 0) & (ratio_K < low))
    return (ratio_K > high) | (ratio_K < low)


def _log_ratio(logp_K: Tensor, sampled_logp_K: Tensor) -> Tensor:
    return (logp_K - sampled_logp_K).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _mean(values_K: Tensor) -> float:
    return float(values_K.double().mean())
