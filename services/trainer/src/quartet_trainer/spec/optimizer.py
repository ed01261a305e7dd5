"""What defines an optimizer: its kind, schedule and clipping, as values."""

from __future__ import annotations

from enum import StrEnum

import pydantic

from quartet_trainer.spec.value import Value


class Schedule(StrEnum):
    """How the learning rate moves."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OptimizerSpec(Value):
    """AdamW, its schedule and clipping."""

    learning_rate: float = pydantic.Field(ge=0)
    beta1: float = pydantic.Field(default=0.9, ge=0, lt=1)
    beta2: float = pydantic.Field(default=0.999, ge=0, lt=1)
    eps: float = pydantic.Field(default=1e-8, gt=0)
    weight_decay: float = pydantic.Field(default=0.0, ge=0)
    max_grad_norm: float = pydantic.Field(default=0.0, ge=0)
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = pydantic.Field(default=0, ge=0)
    total_steps: int = pydantic.Field(default=0, ge=0)

    @pydantic.model_validator(mode="after")
    def _has_an_end(self) -> OptimizerSpec:
        if self.schedule is not Schedule.CONSTANT and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"a {self.schedule.value} schedule needs total_steps above warmup_steps "
                f"({self.total_steps} is not above {self.warmup_steps})"
            )
        return self
