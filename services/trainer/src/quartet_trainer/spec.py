"""What defines a run, a loss and their bounds, as values that are compared and saved. No torch, no proto.

1. Every default of the contract is filled in here, once, so that equal meanings are equal values.
2. `difference` names the first field in which two specs disagree.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal

import pydantic
from quartet.errors import QuartetError

#: Run and state names become folder names.
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")

DType = Literal["", "float32", "bfloat16"]


class _Value(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Schedule(StrEnum):
    """How the learning rate moves."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OptimizerSpec(_Value):
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


class RunSpec(_Value):
    """Everything that defines a run, as the caller gave it.

    Empty dtypes and a zero budget mean "as the trainer's device and configuration say". They stay so here, so
    that a run can be restored by a trainer that is configured otherwise.
    """

    base_model: str = pydantic.Field(min_length=1)
    optimizer: OptimizerSpec
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)
    compute_dtype: DType = ""
    served_dtype: DType = ""
    from_scratch: bool = False
    retain_versions: int = pydantic.Field(default=0, ge=0, le=64)
    microbatch_tokens: int = pydantic.Field(default=0, ge=0)


def difference(held: RunSpec, wanted: RunSpec) -> tuple[str, object, object] | None:
    """The first differing field as (dotted name, held, wanted), or None."""
    ours, theirs = _flat(held), _flat(wanted)
    return next(((key, ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]), None)


def _flat(spec: RunSpec) -> dict[str, object]:
    values = spec.model_dump(mode="json")
    optimizer = values.pop("optimizer")
    return {**values, **{f"optimizer.{key}": value for key, value in optimizer.items()}}


def check_name(field: str, name: str) -> None:
    """Refuse what cannot be a folder name. Errors: INVALID_REQUEST."""
    if not NAME_PATTERN.fullmatch(name) or set(name) == {"."}:
        raise QuartetError(
            "INVALID_REQUEST",
            f"{field} {name!r} is not 1-64 of [A-Za-z0-9_.-]",
            field=field,
            value=name,
            remedy="choose a name of letters, digits, '_', '.' and '-'",
        )


class Ratio(StrEnum):
    """What is done with the ratio between trainer and sampler; CROSS_ENTROPY has none."""

    CISPO = "cispo"
    PPO = "ppo"
    NONE = "none"
    CROSS_ENTROPY = "cross_entropy"


class LossSpec(_Value):
    """A loss as values. See loss.py for the formulas."""

    ratio: Ratio
    clip_low: float | None = pydantic.Field(default=None, ge=0)
    clip_high: float | None = pydantic.Field(default=None, gt=0)
    temperature: float = pydantic.Field(default=1.0, gt=0)
