"""What defines an adapter, as values."""

from __future__ import annotations

import pydantic

from quartet_trainer.spec.value import Value

#: Above the width of any model's projections a low rank is none.
MAX_RANK = 4096


class LoraSpec(Value):
    """An adapter, trained in place of the model. See lora.py."""

    rank: int = pydantic.Field(ge=1, le=MAX_RANK)
    alpha: float = pydantic.Field(gt=0)
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    #: Names of linear modules; none: every one but the head.
    target_modules: tuple[str, ...] = ()
    #: Names of stacked experts, which get low-rank matrices each; none: they stay as they are.
    target_parameters: tuple[str, ...] = ()
    rslora: bool = False
    modules_to_save: tuple[str, ...] = ()
    publish_merged: bool = False
    #: The folder of an adapter to begin with, as peft saves it (initial_adapter.py).
    initial_adapter: str = ""
