"""The importance ratio r between the current policy and the one it is compared with (the proximal policy
where there is one, else the sampler), with gradient.

  token     r = exp(log p - log q)
  sequence  r = exp(mean over the sample of log p - log q), for each of its tokens
            GSPO, arXiv 2507.18071, equation 7.
  VESPO     r = exp(sum over the sample of log p - log q), for each of its tokens: the ratio of whole samples
"""

from __future__ import annotations

from torch import Tensor

from quartet_trainer.loss.tokens import LOG_RATIO_BOUND, Tokens, log_ratio
from quartet_trainer.spec import LossSpec, Ratio, RatioLevel


def ratio(spec: LossSpec, tokens: Tokens) -> Tensor:
    """[K], of every token; where the loss takes none, that of tokens."""
    if not spec.compares or (spec.ratio is not Ratio.VESPO and spec.ratio_level is RatioLevel.TOKEN):
        return ratio_of_tokens(tokens)
    log_ratio_K = log_ratio(tokens.logp_K, tokens.compared_K)
    if spec.ratio is Ratio.VESPO:
        sums_S = tokens.of_samples(log_ratio_K).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return tokens.to_tokens(sums_S.exp())
    return tokens.to_tokens((tokens.of_samples(log_ratio_K) / tokens.lengths_S).exp())


def ratio_of_tokens(tokens: Tokens) -> Tensor:
    """[K], whatever ratio the loss takes."""
    return log_ratio(tokens.logp_K, tokens.compared_K).exp()
