"""LossSpec of the contract to LossSpec of the domain."""

from __future__ import annotations

import pydantic
from quartet.v1 import trainer_service_pb2 as pb

from quartet_trainer.spec import LossSpec, Ratio
from quartet_trainer.wire.refusal import LATER, first, given, refuse_unserved, request

_RATIOS = {
    pb.RATIO_TREATMENT_UNSPECIFIED: Ratio.CISPO,
    pb.RATIO_TREATMENT_CISPO: Ratio.CISPO,
    pb.RATIO_TREATMENT_PPO: Ratio.PPO,
    pb.RATIO_TREATMENT_NONE: Ratio.NONE,
}
_SERVED = {"kind", "ratio", "clip_low", "clip_high", "temperature", "ratio_level", "aggregation"}


def loss_spec(loss: pb.LossSpec) -> LossSpec:
    """A loss. Errors: INVALID_REQUEST."""
    refuse_unserved(loss, "loss.", _SERVED, request)
    if loss.ratio_level > pb.RATIO_LEVEL_TOKEN:
        raise request("loss.ratio_level", loss.ratio_level, LATER)
    if loss.aggregation > pb.AGGREGATION_TOKEN:
        raise request("loss.aggregation", loss.aggregation, LATER)
    if loss.kind == pb.LOSS_KIND_CROSS_ENTROPY:
        ratio = Ratio.CROSS_ENTROPY
    elif loss.kind != pb.LOSS_KIND_POLICY_GRADIENT:
        raise request("loss.kind", loss.kind, "choose POLICY_GRADIENT or CROSS_ENTROPY")
    elif loss.ratio == pb.RATIO_TREATMENT_DPPO:
        raise request("loss.ratio", "DPPO", "DPPO comes in a later build; choose CISPO, PPO or NONE")
    elif loss.ratio not in _RATIOS:
        raise request("loss.ratio", loss.ratio, "choose CISPO, PPO or NONE")
    else:
        ratio = _RATIOS[loss.ratio]
    try:
        return LossSpec(ratio=ratio, **given(loss, "clip_low", "clip_high", "temperature"))
    except pydantic.ValidationError as error:
        key, value, why = first(error, "")
        raise request(f"loss.{key}", value, why) from None
