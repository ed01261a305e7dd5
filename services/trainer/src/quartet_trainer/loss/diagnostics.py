"""What is worth knowing about a batch, by name. Means over covered tokens, except for the maxima.

entropy                  of the distributions, in nats
logprob_mean             log p
mismatch_kl              k3 between sampler and current weights, r - 1 - log r, never negative
logprob_difference_mean, _max        |log p - log sampler|
effective_sample_size    (sum r)^2 / (n * sum r^2), r = p / sampler: 1 where on-policy, towards 0 where a
                         few tokens carry all the weight
ratio_mean, ratio_max, clipped_fraction              of the ratio that the loss takes
reference_kl             the loss's estimate of the divergence from the reference
off_policy_masked_fraction                           left out by off_policy_mask
top_entropy_fraction, top_entropy_threshold          learned from by top_entropy_quantile; their least entropy
correction_mean, correction_bounded_fraction         of the weights for sampler against proximal policy
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet_trainer.loss.correction import correction_weights, unbounded_weights
from quartet_trainer.loss.kl import divergence
from quartet_trainer.loss.off_policy_mask import left_out
from quartet_trainer.loss.ratio import ratio
from quartet_trainer.loss.reference_kl import distilled_advantages
from quartet_trainer.loss.tokens import Tokens, log_ratio
from quartet_trainer.loss.treatment import clipped
from quartet_trainer.spec import LossKind, LossSpec


def diagnostics(spec: LossSpec, tokens: Tokens) -> dict[str, float]:
    """Values by name over all covered tokens of a call; all inputs without gradient."""
    values = {"entropy": _mean(tokens.entropy_K), "logprob_mean": _mean(tokens.logp_K)}
    if tokens.sampled_K is not None:
        values |= _mismatch(tokens.logp_K, tokens.sampled_K)
    if tokens.reference_K is not None:
        values["reference_kl"] = _mean(divergence(spec, tokens))
    if tokens.top_entropy_K is not None:
        values["top_entropy_fraction"] = _mean(tokens.top_entropy_K)
        values["top_entropy_threshold"] = float(tokens.entropy_K[tokens.top_entropy_K].min())
    if tokens.sampled_K is None and tokens.proximal_K is None:
        return values
    ratio_K = ratio(spec, tokens)
    values |= {"ratio_max": float(ratio_K.max()), "ratio_mean": _mean(ratio_K)}
    if spec.compares:
        distils = spec.kind is LossKind.REFERENCE_KL
        advantages_K = distilled_advantages(tokens) if distils else tokens.advantages_K
        values["clipped_fraction"] = _mean(clipped(spec, tokens, ratio_K, advantages_K))
        if spec.off_policy_mask is not None:
            masked_K = left_out(spec.off_policy_mask, tokens, advantages_K)
            values["off_policy_masked_fraction"] = _mean(masked_K)
    if spec.correction is not None:
        free_K = unbounded_weights(spec.correction.level, tokens)
        bounded_K = correction_weights(spec.correction, tokens)
        values["correction_mean"] = _mean(bounded_K)
        values["correction_bounded_fraction"] = _mean(bounded_K != free_K)
    return values


def _mismatch(logp_K: Tensor, sampled_K: Tensor) -> dict[str, float]:
    log_ratio_K = log_ratio(logp_K, sampled_K).double()
    ratio_K = log_ratio_K.exp()
    difference_K = (logp_K - sampled_K).abs()
    return {
        # expm1 keeps the digits that r - 1 would lose near r = 1.
        "mismatch_kl": _mean(torch.expm1(log_ratio_K) - log_ratio_K),
        "logprob_difference_mean": _mean(difference_K),
        "logprob_difference_max": float(difference_K.max()),
        "effective_sample_size": float(ratio_K.sum() ** 2 / (len(ratio_K) * (ratio_K * ratio_K).sum())),
    }


def _mean(values_K: Tensor) -> float:
    return float(values_K.double().mean())
