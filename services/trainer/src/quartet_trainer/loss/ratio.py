"""The importance ratio r between the current policy and the one it is compared with (the proximal policy
where there is one, else the sampler), with gradient.

  token     r = exp(log p - log q)
  sequence  r = exp(mean over the sample of log p - log q), for each of its tokens
            GSPO, arXiv 2507.18071, equation 7.
"""

from __future__ import annotations

from torch import Tensor

from quartet_trainer.loss.tokens import Tokens, log_ratio
from quartet_trainer.spec import RatioLevel


def ratio(level: RatioLevel, tokens: Tokens) -> Tensor:
    """[K], of every token."""
    log_ratio_K = log_ratio(tokens.logp_K, tokens.compared_K)
    if level is RatioLevel.TOKEN:
        return log_ratio_K.exp()
    return tokens.to_tokens((tokens.of_samples(log_ratio_K) / tokens.lengths_S).exp())
