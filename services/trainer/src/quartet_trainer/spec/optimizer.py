"""What defines an optimizer: its kind, schedule and clipping, as values."""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise

import pydantic

from quartet_trainer.spec.value import Value


class Schedule(StrEnum):
    """How the learning rate moves."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"


class OptimizerKind(StrEnum):
    """Which optimizer."""

    ADAMW = "adamw"
    MUON = "muon"
    SGD = "sgd"


class OptimizerSpec(Value):
    """An optimizer, its schedule and clipping. See optimizer.py and schedule.py for the formulas."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    learning_rate: float = pydantic.Field(ge=0)
    beta1: float = pydantic.Field(default=0.9, ge=0, lt=1)
    beta2: float = pydantic.Field(default=0.999, ge=0, lt=1)
    eps: float = pydantic.Field(default=1e-8, gt=0)
    weight_decay: float = pydantic.Field(default=0.0, ge=0)
    max_grad_norm: float = pydantic.Field(default=0.0, ge=0)
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = pydantic.Field(default=0, ge=0)
    total_steps: int = pydantic.Field(default=0, ge=0, validate_default=True)
    momentum: float | None = pydantic.Field(default=None, ge=0, lt=1)
    decay_steps: int = pydantic.Field(default=0, ge=0, validate_default=True)
    adamw_learning_rate: float | None = pydantic.Field(default=None, ge=0)
    earlier_total_steps: tuple[int, ...] = ()
    min_lr: float = pydantic.Field(default=0.0, ge=0)

    @pydantic.field_validator("total_steps")
    @classmethod
    def _has_an_end(cls, total: int, info: pydantic.ValidationInfo) -> int:
        schedule, warmup = info.data.get("schedule", Schedule.CONSTANT), info.data.get("warmup_steps", 0)
        if schedule is not Schedule.CONSTANT and total <= warmup:
            raise ValueError(
                f"a {schedule.value} schedule needs total_steps above warmup_steps "
                f"({total} is not above {warmup})"
            )
        return total

    @pydantic.field_validator("decay_steps")
    @classmethod
    def _decays(cls, steps: int, info: pydantic.ValidationInfo) -> int:
        stable = info.data.get("schedule") is Schedule.WARMUP_STABLE_DECAY
        most = info.data.get("total_steps", 0) - info.data.get("warmup_steps", 0)
        if stable and "total_steps" in info.data and not 0 < steps <= most:
            raise ValueError(
                f"warmup_stable_decay needs decay_steps from 1 to {most}, the steps after the warm-up, "
                f"not {steps}"
            )
        if steps and not stable:
            raise ValueError("decay_steps belongs to the schedule warmup_stable_decay; leave it out")
        return steps

    @pydantic.model_validator(mode="after")
    def _falls(self) -> OptimizerSpec:
        if self.min_lr and self.schedule is Schedule.CONSTANT:
            raise ValueError(
                "min_lr is where a rate ends that falls, and a constant one does not; leave it out"
            )
        if self.min_lr and self.min_lr >= self.learning_rate:
            raise ValueError(
                f"min_lr {self.min_lr} is not below learning_rate {self.learning_rate}, from which the rate "
                "falls; set it to less"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _was_extended(self) -> OptimizerSpec:
        totals = (*self.earlier_total_steps, self.total_steps)
        if any(before >= after for before, after in pairwise(totals)):
            raise ValueError(f"earlier_total_steps ascend, and total_steps is above them, not {totals}")
        return self

    @pydantic.model_validator(mode="after")
    def _belongs_to_the_kind(self) -> OptimizerSpec:
        if self.momentum is not None and self.kind is OptimizerKind.ADAMW:
            raise ValueError("momentum belongs to sgd and muon; adamw has beta1 and beta2")
        if self.adamw_learning_rate is not None:
            if self.kind is not OptimizerKind.MUON:
                raise ValueError("adamw_learning_rate belongs to muon; leave it out")
            if self.learning_rate == 0:
                raise ValueError("adamw_learning_rate keeps its proportion to learning_rate, which is 0 here")
        return self
