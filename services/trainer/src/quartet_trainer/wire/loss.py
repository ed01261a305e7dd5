"""LossSpec of the contract to LossSpec of the domain.

1. Equal messages give equal losses; of those that were read last none is read again: a run sends the same one
   in every step.
2. A loss with arguments of one's own is read each time, because whoever gets them may change them.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pydantic
from quartet.v1 import trainer_service_pb2 as pb

from quartet_trainer.spec import (
    Aggregation,
    Correction,
    CorrectionMode,
    KlEstimator,
    LossKind,
    LossSpec,
    Ratio,
    RatioLevel,
    VespoKernel,
)
from quartet_trainer.wire.refusal import first, given, request

_KINDS = {
    pb.LOSS_KIND_POLICY_GRADIENT: LossKind.POLICY_GRADIENT,
    pb.LOSS_KIND_CROSS_ENTROPY: LossKind.CROSS_ENTROPY,
    pb.LOSS_KIND_REFERENCE_KL: LossKind.REFERENCE_KL,
    pb.LOSS_KIND_CUSTOM: LossKind.CUSTOM,
}
_RATIOS = {
    pb.RATIO_TREATMENT_UNSPECIFIED: Ratio.CISPO,
    pb.RATIO_TREATMENT_CISPO: Ratio.CISPO,
    pb.RATIO_TREATMENT_PPO: Ratio.PPO,
    pb.RATIO_TREATMENT_DPPO: Ratio.DPPO,
    pb.RATIO_TREATMENT_NONE: Ratio.NONE,
    pb.RATIO_TREATMENT_SAPO: Ratio.SAPO,
    pb.RATIO_TREATMENT_VESPO: Ratio.VESPO,
}
_LEVELS = {
    pb.RATIO_LEVEL_UNSPECIFIED: RatioLevel.TOKEN,
    pb.RATIO_LEVEL_TOKEN: RatioLevel.TOKEN,
    pb.RATIO_LEVEL_SEQUENCE: RatioLevel.SEQUENCE,
}
_AGGREGATIONS = {
    pb.AGGREGATION_UNSPECIFIED: Aggregation.TOKEN,
    pb.AGGREGATION_TOKEN: Aggregation.TOKEN,
    pb.AGGREGATION_SEQUENCE: Aggregation.SEQUENCE,
}
_ESTIMATORS = {
    pb.KL_ESTIMATOR_K1: KlEstimator.K1,
    pb.KL_ESTIMATOR_K2: KlEstimator.K2,
    pb.KL_ESTIMATOR_K3: KlEstimator.K3,
}
_MODES = {
    pb.CORRECTION_MODE_TRUNCATE: CorrectionMode.TRUNCATE,
    pb.CORRECTION_MODE_MASK: CorrectionMode.MASK,
}
#: Runs at once take turns, most of them with one loss.
KEPT = 16


def loss_spec(loss: pb.LossSpec) -> LossSpec:
    """A loss. Errors: INVALID_REQUEST."""
    return _read(loss) if loss.custom_args else _known(loss.SerializeToString(deterministic=True))


@lru_cache(KEPT)
def _known(serialised: bytes) -> LossSpec:
    return _read(pb.LossSpec.FromString(serialised))


def _read(loss: pb.LossSpec) -> LossSpec:
    values = given(
        loss,
        *("clip_low", "clip_high", "temperature", "delta", "kl_coef", "target_kl", "entropy_coef"),
        *("proximal_version", "tau_positive", "tau_negative", "off_policy_mask"),
        *("top_entropy_quantile", "target_entropy", "entropy_coef_delta"),
    )
    if loss.kl_estimator != pb.KL_ESTIMATOR_UNSPECIFIED:
        values["kl_estimator"] = _chosen("kl_estimator", loss.kl_estimator, _ESTIMATORS)
    try:
        return LossSpec(
            kind=_chosen("kind", loss.kind, _KINDS),
            ratio=_chosen("ratio", loss.ratio, _RATIOS),
            ratio_level=_chosen("ratio_level", loss.ratio_level, _LEVELS),
            aggregation=_chosen("aggregation", loss.aggregation, _AGGREGATIONS),
            correction=_correction(loss.correction) if loss.HasField("correction") else None,
            kernel=_kernel(loss.kernel) if loss.HasField("kernel") else None,
            kl_weighted=loss.kl_weighted,
            proximal_returns=loss.proximal_returns,
            custom=loss.custom,
            custom_args=custom_args(loss.custom_args, "loss.custom_args"),
            **values,
        )
    except pydantic.ValidationError as error:
        raise request(*first(error, "loss")) from None


def custom_args(text: str, field: str) -> dict[str, Any]:
    """What a loss of one's own gets by name; of which kinds the values are is the LossSpec's to check.
    Errors: INVALID_REQUEST."""
    try:
        args = json.loads(text) if text else {}
        # An escape may stand for half a surrogate pair, which the other ranks could not read.
        json.dumps(args, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        args = None
    if not isinstance(args, dict):
        raise request(field, text, 'send a JSON object, such as {"tau": 0.1}')
    return args


def _correction(correction: pb.MismatchCorrection) -> Correction:
    if correction.mode == pb.CORRECTION_MODE_UNSPECIFIED:  # as a misspelt one is sent, too
        remedy = "choose TRUNCATE or MASK, or leave correction out"
        raise request("loss.correction.mode", "UNSPECIFIED", remedy)
    try:
        return Correction(
            mode=_chosen("correction.mode", correction.mode, _MODES),
            level=_chosen("correction.level", correction.level, _LEVELS),
            **given(correction, "cap", "floor"),
        )
    except pydantic.ValidationError as error:
        raise request(*first(error, "loss.correction")) from None


def _kernel(kernel: pb.VespoKernel) -> VespoKernel:
    try:
        return VespoKernel(**given(kernel, *VespoKernel.model_fields))
    except pydantic.ValidationError as error:
        raise request(*first(error, "loss.kernel")) from None


def _chosen(field: str, value: int, choices: dict[Any, Any]) -> Any:
    if value not in choices:
        raise request(f"loss.{field}", value, f"choose one of {', '.join(sorted(set(choices.values())))}")
    return choices[value]
