"""What defines a run, as values that are compared and saved."""

from __future__ import annotations

from typing import Literal

import pydantic

from quartet_trainer.spec.lora import LoraSpec
from quartet_trainer.spec.optimizer import OptimizerSpec
from quartet_trainer.spec.reference import ReferenceSpec
from quartet_trainer.spec.value import Value

DType = Literal["", "float32", "bfloat16"]


class RunSpec(Value):
    """Everything that defines a run, as the caller gave it.

    Empty dtypes and a zero budget mean "as the trainer's device and configuration say". They stay so here, so
    that a run can be restored by a trainer that is configured otherwise.
    """

    base_model: str = pydantic.Field(min_length=1)
    #: Train this adapter instead of the full model.
    lora: LoraSpec | None = None
    optimizer: OptimizerSpec
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)
    compute_dtype: DType = ""
    served_dtype: DType = ""
    from_scratch: bool = False
    retain_versions: int = pydantic.Field(default=0, ge=0, le=64)
    microbatch_tokens: int = pydantic.Field(default=0, ge=0)
    reference: ReferenceSpec | None = None
    gradient_checkpointing: bool = False
    freeze_routers: bool = False
    #: The folder of a saved state to begin with.
    initial_state: str = ""
    #: Begin with its weights alone, and with moments of no step.
    fresh_optimizer: bool = False

    @pydantic.field_validator("from_scratch", "initial_state")
    @classmethod
    def _begins_once(cls, value: bool | str, info: pydantic.ValidationInfo) -> bool | str:
        lora: LoraSpec | None = info.data.get("lora")
        if value and lora is not None and lora.initial_adapter:
            raise ValueError("lora.initial_adapter says what the adapter begins with; leave one of them out")
        return value

    @pydantic.field_validator("initial_state")
    @classmethod
    def _of_a_trained_model(cls, value: str, info: pydantic.ValidationInfo) -> str:
        if value and info.data.get("from_scratch"):
            raise ValueError("from_scratch begins with random weights; leave one of them out")
        return value

    @pydantic.field_validator("fresh_optimizer")
    @classmethod
    def _of_a_state(cls, value: bool, info: pydantic.ValidationInfo) -> bool:
        if value and not info.data.get("initial_state"):
            raise ValueError("without initial_state every optimizer is fresh; leave it out")
        return value

    @pydantic.field_validator("freeze_routers")
    @classmethod
    def _of_whole_models(cls, value: bool, info: pydantic.ValidationInfo) -> bool:
        if value and info.data.get("lora") is not None:
            raise ValueError("freeze_routers is for whole models: an adapter moves no router; leave it out")
        return value


def difference(held: RunSpec, wanted: RunSpec) -> tuple[str, object, object] | None:
    """The first differing field as (dotted name, held, wanted), or None."""
    ours, theirs = _flat(held.model_dump(mode="json")), _flat(wanted.model_dump(mode="json"))
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return next(
        ((key, ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)), None
    )


def extends(held: RunSpec, wanted: RunSpec) -> bool:
    """Whether they differ in the steps alone: `wanted` goes on where the steps of `held` end."""
    ours, theirs = held.optimizer, wanted.optimizer
    totals = (*ours.earlier_total_steps, ours.total_steps)
    begins_alike = theirs.earlier_total_steps[: len(totals)] == totals
    steps = {name: getattr(theirs, name) for name in ("earlier_total_steps", "total_steps")}
    longer = held.model_copy(update={"optimizer": ours.model_copy(update=steps)})
    return begins_alike and longer == wanted


def _flat(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
