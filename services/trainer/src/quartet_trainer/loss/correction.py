"""Weights for what lies between sampler and proximal policy: other arithmetic, older weights. No gradient.

w = exp(log proximal - log sampler), of a token, or of a sample: the product over its covered tokens
truncate  min(w, cap)                            TIS: Yao et al., Your efficient RL framework secretly
                                                 brings you off-policy RL training, 2025
mask      w where floor <= w <= cap, else 0      MIS; IcePop of Ring-1T, arXiv 2510.18855
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet_trainer.loss.tokens import LOG_RATIO_BOUND, Tokens, log_ratio
from quartet_trainer.spec import Correction, CorrectionMode, RatioLevel


def correction_weights(correction: Correction, tokens: Tokens) -> Tensor:
    """[K]."""
    weight_K = unbounded_weights(correction.level, tokens)
    if correction.mode is CorrectionMode.TRUNCATE:
        return weight_K.clamp(max=correction.cap)
    inside_K = (weight_K >= correction.floor) & (weight_K <= correction.cap)
    return torch.where(inside_K, weight_K, 0.0)


def unbounded_weights(level: RatioLevel, tokens: Tokens) -> Tensor:
    """w: [K]."""
    assert tokens.proximal_K is not None and tokens.sampled_K is not None, "checked at the border"
    difference_K = tokens.proximal_K - tokens.sampled_K
    if level is RatioLevel.TOKEN:
        return log_ratio(tokens.proximal_K, tokens.sampled_K).exp()
    sums_S = tokens.of_samples(difference_K).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return tokens.to_tokens(sums_S.exp())
