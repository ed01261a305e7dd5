"""The loss, whole: every switch of LossSpec in the order in which it acts.

  policy gradient  treatment(ratio, A)          times the correction's weights; 0 for off-policy samples,
                                                and for all but the tokens of the highest entropy
  reference KL     the same with A + sg(log reference - log p)
  cross-entropy    -A * log p                   A = 1 where none are given
  custom           the function that was named
  + kl_coef * divergence from the reference - entropy_coef * entropy
  each token weighted as the aggregation says

The caller sums and divides by the normalizer of the batch; there is no other averaging.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quartet_trainer.loss.aggregation import aggregated
from quartet_trainer.loss.correction import correction_weights
from quartet_trainer.loss.custom import CustomLoss
from quartet_trainer.loss.kl import divergence
from quartet_trainer.loss.off_policy_mask import left_out
from quartet_trainer.loss.own_metrics import OwnMetrics
from quartet_trainer.loss.ratio import ratio
from quartet_trainer.loss.reference_kl import distilled_advantages
from quartet_trainer.loss.tokens import Tokens
from quartet_trainer.loss.treatment import treated
from quartet_trainer.spec import LossKind, LossSpec, Ratio

NO_CUSTOM: Mapping[str, CustomLoss] = {}


def token_losses(
    spec: LossSpec,
    tokens: Tokens,
    custom: Mapping[str, CustomLoss] = NO_CUSTOM,
    own: OwnMetrics | None = None,
) -> Tensor:
    """The loss of each covered token. `own` gets what a loss of one's own reports."""
    match spec.kind:
        case LossKind.POLICY_GRADIENT:
            losses_K = _learned(tokens, _policy_gradient(spec, tokens, tokens.advantages_K))
        case LossKind.REFERENCE_KL:
            losses_K = _learned(tokens, _policy_gradient(spec, tokens, distilled_advantages(tokens)))
        case LossKind.CROSS_ENTROPY:
            losses_K = -tokens.advantages_K * tokens.logp_K
        case LossKind.CUSTOM:
            losses_K = custom[spec.custom](spec, tokens, own)
    if spec.kl_coef:
        losses_K = losses_K + spec.kl_coef * divergence(spec, tokens)
    if spec.entropy_coef:
        losses_K = losses_K - spec.entropy_coef * tokens.entropy_K
    return aggregated(spec.aggregation, losses_K, tokens)


def _policy_gradient(spec: LossSpec, tokens: Tokens, advantages_K: Tensor) -> Tensor:
    if spec.ratio is Ratio.NONE:
        return -advantages_K * tokens.logp_K
    losses_K = treated(spec, tokens, ratio(spec, tokens), advantages_K)
    if spec.correction is not None:
        losses_K = losses_K * correction_weights(spec.correction, tokens)
    if spec.off_policy_mask is not None:
        losses_K = losses_K.masked_fill(left_out(spec.off_policy_mask, tokens, advantages_K), 0.0)
    return losses_K


def _learned(tokens: Tokens, losses_K: Tensor) -> Tensor:
    return losses_K if tokens.top_entropy_K is None else losses_K.masked_fill(~tokens.top_entropy_K, 0.0)
