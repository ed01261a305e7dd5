"""RunSpec of the contract to RunSpec of the domain."""

from __future__ import annotations

import pydantic
from quartet.v1 import trainer_service_pb2 as pb

from quartet_trainer.spec import OptimizerSpec, RunSpec, Schedule
from quartet_trainer.wire.refusal import LATER, config, first, given, refuse_unserved

_SCHEDULES = {
    pb.SCHEDULE_UNSPECIFIED: Schedule.CONSTANT,
    pb.SCHEDULE_CONSTANT: Schedule.CONSTANT,
    pb.SCHEDULE_LINEAR: Schedule.LINEAR,
    pb.SCHEDULE_COSINE: Schedule.COSINE,
}

#: What a message may carry here. The contract has more, which the domain would silently lack.
_SERVED_RUN = {
    *("base_model", "lora", "optimizer", "seed", "compute_dtype", "served_dtype", "from_scratch"),
    *("retain_versions", "microbatch_tokens"),
}
_SERVED_OPTIMIZER = {
    *("kind", "learning_rate", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm", "schedule"),
    *("warmup_steps", "total_steps"),
}


def run_spec(spec: pb.RunSpec) -> RunSpec:
    """A run's spec. Errors: INVALID_CONFIG."""
    refuse_unserved(spec, "", _SERVED_RUN, config)
    if spec.HasField("lora"):
        raise config(
            "lora", spec.lora.rank, "adapters come in a later build; leave lora out to train the full model"
        )
    try:
        return RunSpec(
            base_model=spec.base_model,
            optimizer=_optimizer(spec.optimizer),
            seed=spec.seed,
            compute_dtype=spec.compute_dtype,  # type: ignore[arg-type]  # pydantic checks it
            served_dtype=spec.served_dtype,  # type: ignore[arg-type]
            from_scratch=spec.from_scratch,
            retain_versions=spec.retain_versions,
            microbatch_tokens=spec.microbatch_tokens,
        )
    except pydantic.ValidationError as error:
        raise config(*first(error, "spec")) from None


def _optimizer(spec: pb.OptimizerSpec) -> OptimizerSpec:
    refuse_unserved(spec, "optimizer.", _SERVED_OPTIMIZER, config)
    if spec.kind > pb.OPTIMIZER_KIND_ADAMW:
        raise config("optimizer.kind", pb.OptimizerKind.Name(spec.kind), LATER)
    if spec.schedule not in _SCHEDULES:
        raise config("optimizer.schedule", spec.schedule, "choose constant, linear or cosine")
    try:
        return OptimizerSpec(
            **given(spec, "beta1", "beta2", "eps", "weight_decay", "max_grad_norm"),
            learning_rate=spec.learning_rate,
            schedule=_SCHEDULES[spec.schedule],
            warmup_steps=spec.warmup_steps,
            total_steps=spec.total_steps,
        )
    except pydantic.ValidationError as error:
        raise config(*first(error, "optimizer")) from None
