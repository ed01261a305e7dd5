"""On-policy distillation: the advantage of a token is by how much a teacher likes it better than the policy.

  A_t = A + sg(log reference - log p)

So the policy gradient of it is minus that of KL(policy || reference) on the policy's own tokens: On-policy
distillation of language models, arXiv 2306.13649; Thinking Machines Lab, On-Policy Distillation, 2025.
"""

from __future__ import annotations

from torch import Tensor

from quartet_trainer.loss.tokens import Tokens, log_ratio


def distilled_advantages(tokens: Tokens) -> Tensor:
    """[K], without gradient."""
    assert tokens.reference_K is not None, "checked at the border"
    return tokens.advantages_K + log_ratio(tokens.reference_K, tokens.logp_K.detach())
