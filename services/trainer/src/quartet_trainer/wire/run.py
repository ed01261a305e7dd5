"""RunSpec of the contract to RunSpec of the domain."""

from __future__ import annotations

import pydantic
from quartet.v1 import trainer_service_pb2 as pb

from quartet_trainer.spec import RunSpec
from quartet_trainer.wire.optimizer import lora_spec, optimizer_spec
from quartet_trainer.wire.reference import reference_spec
from quartet_trainer.wire.refusal import config, first


def run_spec(spec: pb.RunSpec) -> RunSpec:
    """A run's spec. Errors: INVALID_CONFIG."""
    try:
        return RunSpec(
            base_model=spec.base_model,
            lora=lora_spec(spec.lora) if spec.HasField("lora") else None,
            optimizer=optimizer_spec(spec.optimizer),
            seed=spec.seed,
            compute_dtype=spec.compute_dtype,  # type: ignore[arg-type]  # pydantic checks it
            served_dtype=spec.served_dtype,  # type: ignore[arg-type]
            from_scratch=spec.from_scratch,
            retain_versions=spec.retain_versions,
            microbatch_tokens=spec.microbatch_tokens,
            reference=reference_spec(spec.reference) if spec.HasField("reference") else None,
            gradient_checkpointing=spec.gradient_checkpointing,
            freeze_routers=spec.freeze_routers,
            initial_state=spec.initial_state,
            fresh_optimizer=spec.fresh_optimizer,
        )
    except pydantic.ValidationError as error:
        raise config(*first(error)) from None
