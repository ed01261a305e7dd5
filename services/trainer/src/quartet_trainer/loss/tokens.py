"""What a loss reads: the covered tokens of one micro-batch, in whole samples.

Shapes: S samples, K covered tokens of all of them, one sample after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: |log r| is cut here so that one token with a vanished probability cannot make a batch infinite. e^20 lies
#: far past every clip.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Covered tokens. Only logp_K carries a gradient, and entropy_K where the loss has an entropy term."""

    # Log-probability under the current weights, at the loss's temperature.
    logp_K: Tensor
    # Of the distribution that each token was drawn from, in nats.
    entropy_K: Tensor
    advantages_K: Tensor
    # Covered tokens of each sample.
    lengths_S: Tensor
    # By the sampler, by the proximal policy, by the reference; None where there is none.
    sampled_K: Tensor | None = None
    proximal_K: Tensor | None = None
    reference_K: Tensor | None = None
    # Whether each is among those of the highest entropy, from which alone the policy gradient learns; None:
    # it learns from all.
    top_entropy_K: Tensor | None = None

    @property
    def compared_K(self) -> Tensor:
        """Log-probabilities that the ratio is taken against: the proximal policy's, else the sampler's."""
        compared = self.sampled_K if self.proximal_K is None else self.proximal_K
        assert compared is not None, "checked at the border"
        return compared

    def of_samples(self, values_K: Tensor) -> Tensor:
        """Sum over each sample: [S]."""
        sums_S = torch.zeros(len(self.lengths_S), dtype=values_K.dtype, device=values_K.device)
        return sums_S.index_add(0, self._sample_K, values_K)

    def to_tokens(self, values_S: Tensor) -> Tensor:
        """The value of its sample for every token: [K]."""
        return values_S.index_select(0, self._sample_K)

    @property
    def _sample_K(self) -> Tensor:
        numbers = torch.arange(len(self.lengths_S), device=self.lengths_S.device)
        return numbers.repeat_interleave(self.lengths_S)


def log_ratio(logp_K: Tensor, compared_K: Tensor) -> Tensor:
    """Difference of log-probabilities, bounded."""
    return (logp_K - compared_K).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
