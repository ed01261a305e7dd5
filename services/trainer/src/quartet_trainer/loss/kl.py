"""Estimates of KL(policy || reference) on tokens that the policy drew, with gradient; d = log ref - log p.

  k1  -d
  k2  d * d / 2
  k3  exp(d) - d - 1

J. Schulman, Approximating KL Divergence, 2020. k3 is GRPO's (arXiv 2402.03300, equation 4). On-policy the
gradient of k1 is zero in expectation; that of k2 is the gradient of the divergence of each token behind what
was sampled, that of k3 the gradient of KL(reference || policy) there. Weighted, each is times the ratio of
the token: with k1 and k3 the gradient is that of the divergence, also on tokens that the compared policy drew
(DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
"""

from __future__ import annotations

from torch import Tensor

from quartet_trainer.loss.ratio import ratio_of_tokens
from quartet_trainer.loss.tokens import Tokens, log_ratio
from quartet_trainer.spec import KlEstimator, LossSpec


def divergence(spec: LossSpec, tokens: Tokens) -> Tensor:
    """[K]."""
    assert tokens.reference_K is not None, "checked at the border"
    estimated_K = _estimated(spec.kl_estimator, log_ratio(tokens.reference_K, tokens.logp_K))
    return estimated_K * ratio_of_tokens(tokens) if spec.kl_weighted else estimated_K


def _estimated(estimator: KlEstimator, d_K: Tensor) -> Tensor:
    match estimator:
        case KlEstimator.K1:
            return -d_K
        case KlEstimator.K2:
            return d_K * d_K / 2
        case KlEstimator.K3:
            # expm1 keeps the digits that exp(d) - 1 would lose near d = 0.
            return d_K.expm1() - d_K
