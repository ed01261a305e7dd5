"""Estimates of KL(policy || reference) on tokens that the policy drew, with gradient; d = log ref - log p.

  k1  -d
  k2  d * d / 2
  k3  exp(d) - d - 1

J. Schulman, Approximating KL Divergence, 2020. k3 is GRPO's (arXiv 2402.03300, equation 4). On-policy the
gradient of k1 is zero in expectation; that of k2 is the gradient of the divergence of each token behind what
was sampled, that of k3 the gradient of KL(reference || policy) there.
"""

from __future__ import annotations

from torch import Tensor

from quartet_trainer.loss.tokens import log_ratio
from quartet_trainer.spec import KlEstimator


def divergence(estimator: KlEstimator, logp_K: Tensor, reference_K: Tensor) -> Tensor:
    """[K]."""
    d_K = log_ratio(reference_K, logp_K)
    match estimator:
        case KlEstimator.K1:
            return -d_K
        case KlEstimator.K2:
            return d_K * d_K / 2
        case KlEstimator.K3:
            # expm1 keeps the digits that exp(d) - 1 would lose near d = 0.
            return d_K.expm1() - d_K
