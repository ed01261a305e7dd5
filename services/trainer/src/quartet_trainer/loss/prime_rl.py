"""The losses of prime-rl 0.8, for runs that come from its files (quartet.run.prime_rl). Every trainer has
them, as "prime_rl_dppo" and "prime_rl_ipo" (custom.py).

With p the current policy, q the sampler, r = p / q:

  dppo  adv_tau * -r * A where p - q <= mask_high for A > 0 and >= -mask_low for A <= 0, else 0
  ipo   adv_tau * -r * A where |p - q| <= eps, else 0
  both  + kl_tau * (log r)^2 of every covered token, whether its first term was left out or not

The first is `loss = "dppo"` plus the pull towards the sampler, which no other loss here has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet_trainer.loss.tokens import Tokens, log_ratio
from quartet_trainer.spec import LossSpec

Reported = tuple[Tensor, dict[str, Tensor]]


def dppo(
    spec: LossSpec,
    tokens: Tokens,
    *,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> Reported:
    """`[trainer.loss] type = "default"`."""
    moved_K = _moved(tokens)
    left_out_K = torch.where(tokens.advantages_K > 0, moved_K > mask_high, moved_K < -mask_low)
    return _loss(tokens, left_out_K, adv_tau, kl_tau)


def ipo(
    spec: LossSpec, tokens: Tokens, *, eps: float = 0.1, adv_tau: float = 1.0, kl_tau: float = 1e-3
) -> Reported:
    """`[trainer.loss] type = "ipo"`."""
    return _loss(tokens, _moved(tokens).abs() > eps, adv_tau, kl_tau)


def _moved(tokens: Tokens) -> Tensor:
    """By how much a token's probability changed since it was sampled."""
    return tokens.logp_K.detach().exp() - tokens.compared_K.exp()


def _loss(tokens: Tokens, left_out_K: Tensor, adv_tau: float, kl_tau: float) -> Reported:
    log_ratio_K = log_ratio(tokens.logp_K, tokens.compared_K)
    gained_K = adv_tau * tokens.advantages_K * log_ratio_K.exp()
    losses_K = kl_tau * log_ratio_K**2 - torch.where(left_out_K, 0.0, gained_K)
    return losses_K, {"masked_fraction": left_out_K.float()}
