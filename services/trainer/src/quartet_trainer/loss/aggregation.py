"""How the tokens of a sample weigh in the sum that the normalizer divides.

token     1                        With the number of covered tokens as normalizer: the token mean (DAPO,
                                   arXiv 2503.14476). With a constant: Dr. GRPO, arXiv 2503.20783.
sequence  1 / covered tokens       With the number of samples as normalizer: the mean of the samples' means
                                   (GRPO, arXiv 2402.03300).
"""

from __future__ import annotations

from torch import Tensor

from quartet_trainer.loss.tokens import Tokens
from quartet_trainer.spec import Aggregation


def aggregated(aggregation: Aggregation, losses_K: Tensor, tokens: Tokens) -> Tensor:
    """[K], to be summed."""
    if aggregation is Aggregation.TOKEN:
        return losses_K
    return losses_K / tokens.to_tokens(tokens.lengths_S)
