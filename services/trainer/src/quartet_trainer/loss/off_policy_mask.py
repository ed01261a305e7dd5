"""Which samples have moved too far from their sampler to be learned from: Off-Policy Sequence Masking of
DeepSeek-V3.2, arXiv 2512.02556, section 3.1.

A token is left out where its advantage is below 0 and the mean over its sample of log sampler - log p is
above the threshold: what has become unlikely since is not pushed further down.
"""

from __future__ import annotations

from torch import Tensor

from quartet_trainer.loss.tokens import Tokens


def left_out(threshold: float, tokens: Tokens, advantages_K: Tensor) -> Tensor:
    """[K] of truth values."""
    assert tokens.sampled_K is not None, "checked at the border"
    moved_S = tokens.of_samples(tokens.sampled_K - tokens.logp_K.detach()) / tokens.lengths_S
    return (advantages_K < 0) & tokens.to_tokens(moved_S > threshold)
