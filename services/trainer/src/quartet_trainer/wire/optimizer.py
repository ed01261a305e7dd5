"""OptimizerSpec and LoraSpec of the contract to those of the domain."""

from __future__ import annotations

import pydantic
from quartet.v1 import trainer_service_pb2 as pb

from quartet_trainer.spec.lora import LoraSpec
from quartet_trainer.spec.optimizer import OptimizerKind, OptimizerSpec, Schedule
from quartet_trainer.wire.refusal import config, first, given

_SCHEDULES = {
    pb.SCHEDULE_UNSPECIFIED: Schedule.CONSTANT,
    pb.SCHEDULE_CONSTANT: Schedule.CONSTANT,
    pb.SCHEDULE_LINEAR: Schedule.LINEAR,
    pb.SCHEDULE_COSINE: Schedule.COSINE,
    pb.SCHEDULE_WARMUP_STABLE_DECAY: Schedule.WARMUP_STABLE_DECAY,
}
_KINDS = {
    pb.OPTIMIZER_KIND_UNSPECIFIED: OptimizerKind.ADAMW,
    pb.OPTIMIZER_KIND_ADAMW: OptimizerKind.ADAMW,
    pb.OPTIMIZER_KIND_MUON: OptimizerKind.MUON,
    pb.OPTIMIZER_KIND_SGD: OptimizerKind.SGD,
}


def optimizer_spec(spec: pb.OptimizerSpec) -> OptimizerSpec:
    """An optimizer. Errors: INVALID_CONFIG."""
    if spec.kind not in _KINDS:
        raise config("optimizer.kind", spec.kind, "choose AdamW, Muon or SGD")
    if spec.schedule not in _SCHEDULES:
        known = "choose constant, linear, cosine or warm-up-stable-decay"
        raise config("optimizer.schedule", spec.schedule, known)
    optional = ("beta1", "beta2", "eps", "weight_decay", "max_grad_norm", "momentum", "adamw_learning_rate")
    try:
        return OptimizerSpec(
            **given(spec, *optional),
            kind=_KINDS[spec.kind],
            learning_rate=spec.learning_rate,
            schedule=_SCHEDULES[spec.schedule],
            warmup_steps=spec.warmup_steps,
            total_steps=spec.total_steps,
            decay_steps=spec.decay_steps,
            earlier_total_steps=tuple(spec.earlier_total_steps),
            min_lr=spec.min_lr,
        )
    except pydantic.ValidationError as error:
        raise config(*first(error, "optimizer")) from None


def lora_spec(spec: pb.LoraSpec) -> LoraSpec:
    """An adapter. Errors: INVALID_CONFIG."""
    try:
        return LoraSpec(
            rank=spec.rank,
            alpha=spec.alpha,
            dropout=spec.dropout,
            target_modules=tuple(spec.target_modules),
            target_parameters=tuple(spec.target_parameters),
            rslora=spec.rslora,
            modules_to_save=tuple(spec.modules_to_save),
            publish_merged=spec.publish_merged,
            initial_adapter=spec.initial_adapter,
        )
    except pydantic.ValidationError as error:
        raise config(*first(error, "lora")) from None
