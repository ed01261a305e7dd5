"""Protobuf <-> domain, and nothing else. What the contract leaves open is refused here by name. No torch.

Fields that this build does not serve (adapters, DPPO, reference models, ...) are refused,
never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pydantic
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb

from quartet_trainer.sample import Sample, make_sample
from quartet_trainer.spec import LossSpec, OptimizerSpec, Ratio, RunSpec, Schedule

_SCHEDULES = {
    pb.SCHEDULE_UNSPECIFIED: Schedule.CONSTANT,
    pb.SCHEDULE_CONSTANT: Schedule.CONSTANT,
    pb.SCHEDULE_LINEAR: Schedule.LINEAR,
    pb.SCHEDULE_COSINE: Schedule.COSINE,
}
_RATIOS = {
    pb.RATIO_TREATMENT_UNSPECIFIED: Ratio.CISPO,
    pb.RATIO_TREATMENT_CISPO: Ratio.CISPO,
    pb.RATIO_TREATMENT_PPO: Ratio.PPO,
    pb.RATIO_TREATMENT_NONE: Ratio.NONE,
}


#: What a message may carry here. The contract has more, which the domain would silently lack.
_SERVED = {
    "": {
        *("base_model", "lora", "optimizer", "seed", "compute_dtype", "served_dtype", "from_scratch"),
        *("retain_versions", "microbatch_tokens"),
    },
    "optimizer.": {
        *("kind", "learning_rate", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm", "schedule"),
        *("warmup_steps", "total_steps"),
    },
    "loss.": {"kind", "ratio", "clip_low", "clip_high", "temperature", "ratio_level", "aggregation"},
}
_LATER = "comes in a later build; leave it out"


def run_spec(spec: pb.RunSpec) -> RunSpec:
    """A run's spec. Errors: INVALID_CONFIG."""
    _refuse_unserved(spec, "", _config)
    _refuse_unserved(spec.optimizer, "optimizer.", _config)
    if spec.optimizer.kind > pb.OPTIMIZER_KIND_ADAMW:
        raise _config("optimizer.kind", pb.OptimizerKind.Name(spec.optimizer.kind), _LATER)
    if spec.HasField("lora"):
        raise _config(
            "lora", spec.lora.rank, "adapters come in a later build; leave lora out to train the full model"
        )
    if spec.optimizer.schedule not in _SCHEDULES:
        raise _config("optimizer.schedule", spec.optimizer.schedule, "choose constant, linear or cosine")
    try:
        optimizer = OptimizerSpec(
            **_given(spec.optimizer, "beta1", "beta2", "eps", "weight_decay", "max_grad_norm"),
            learning_rate=spec.optimizer.learning_rate,
            schedule=_SCHEDULES[spec.optimizer.schedule],
            warmup_steps=spec.optimizer.warmup_steps,
            total_steps=spec.optimizer.total_steps,
        )
        return RunSpec(
            base_model=spec.base_model,
            optimizer=optimizer,
            seed=spec.seed,
            compute_dtype=spec.compute_dtype,  # type: ignore[arg-type]  # pydantic checks it
            served_dtype=spec.served_dtype,  # type: ignore[arg-type]
            from_scratch=spec.from_scratch,
            retain_versions=spec.retain_versions,
            microbatch_tokens=spec.microbatch_tokens,
        )
    except pydantic.ValidationError as error:
        key, value, why = _first(error)
        raise _config(key, value, why) from None


def loss_spec(loss: pb.LossSpec) -> LossSpec:
    """A loss. Errors: INVALID_REQUEST."""
    _refuse_unserved(loss, "loss.", _request)
    if loss.ratio_level > pb.RATIO_LEVEL_TOKEN:
        raise _request("loss.ratio_level", loss.ratio_level, _LATER)
    if loss.aggregation > pb.AGGREGATION_TOKEN:
        raise _request("loss.aggregation", loss.aggregation, _LATER)
    if loss.kind == pb.LOSS_KIND_CROSS_ENTROPY:
        ratio = Ratio.CROSS_ENTROPY
    elif loss.kind != pb.LOSS_KIND_POLICY_GRADIENT:
        raise _request("loss.kind", loss.kind, "choose POLICY_GRADIENT or CROSS_ENTROPY")
    elif loss.ratio == pb.RATIO_TREATMENT_DPPO:
        raise _request("loss.ratio", "DPPO", "DPPO comes in a later build; choose CISPO, PPO or NONE")
    elif loss.ratio not in _RATIOS:
        raise _request("loss.ratio", loss.ratio, "choose CISPO, PPO or NONE")
    else:
        ratio = _RATIOS[loss.ratio]
    try:
        return LossSpec(ratio=ratio, **_given(loss, "clip_low", "clip_high", "temperature"))
    except pydantic.ValidationError as error:
        key, value, why = _first(error)
        raise _request(f"loss.{key}", value, why) from None


def training_sample(index: int, sample: pb.TrainingSample) -> Sample:
    """A sample of a batch. Errors: INVALID_REQUEST."""
    if sample.reference_logprobs:
        field = f"samples[{index}].reference_logprobs"
        raise _request(
            field, len(sample.reference_logprobs), "no loss of this build uses them; leave them out"
        )
    inner = sample.sample
    spans = [(span.start, span.length, span.policy_version) for span in inner.spans]
    return make_sample(index, inner.token_ids, spans, inner.logprobs, sample.advantages)


def _refuse_unserved(message: Any, prefix: str, refused: Callable[[str, Any, str], QuartetError]) -> None:
    for field, _ in message.ListFields():
        if field.name not in _SERVED[prefix]:
            raise refused(prefix + field.name, str(getattr(message, field.name)).strip(), _LATER)


def _given(message: Any, *fields: str) -> dict[str, Any]:
    """The optional fields that were set, so that the domain's defaults hold for the others."""
    return {field: getattr(message, field) for field in fields if message.HasField(field)}


def _first(error: pydantic.ValidationError) -> tuple[str, Any, str]:
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"]) or "optimizer"
    value = problem["input"]
    shown = value if isinstance(value, (int, float, str)) else ""
    return key, shown, problem["msg"].removeprefix("Value error, ")


def _config(key: str, value: Any, why: str) -> QuartetError:
    return QuartetError(
        "INVALID_CONFIG", f"{key} = {value!r} is refused: {why}", key=key, value=value, remedy=why
    )


def _request(field: str, value: Any, why: str) -> QuartetError:
    return QuartetError(
        "INVALID_REQUEST", f"{field} = {value!r} is refused: {why}", field=field, value=value, remedy=why
    )
