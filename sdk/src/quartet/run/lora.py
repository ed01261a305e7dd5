"""The [lora] table: an adapter that is trained in place of the model."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from quartet.config.model import rule
from quartet.run.switched import SwitchedConfig
from quartet.run.values import Positive, Text
from quartet.v1.trainer_service_pb2 import LoraSpec

#: The trainer's bound.
MAX_RANK = 4096
#: Keys as the contract calls them.
CONTRACT_KEYS: Final = {"lora.rank": "lora.r", "lora.rslora": "lora.use_rslora"}
#: peft's word for what is meant where no module is named.
ALL_LINEAR: Final = "all-linear"


def _named(modules: Any) -> Any:
    return () if modules in (ALL_LINEAR, [ALL_LINEAR], (ALL_LINEAR,)) else modules


class LoraConfig(SwitchedConfig):
    """LoRA (arXiv 2106.09685), by the names of peft."""

    #: Its rank.
    r: Annotated[int, Field(ge=1, le=MAX_RANK, strict=True)] = 16
    #: What is added is scaled by alpha / r.
    alpha: Positive = 32.0
    #: Of what goes into the adapter, in training.
    dropout: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.0
    #: Names of linear modules; none, or "all-linear": every one but the head.
    target_modules: Annotated[tuple[Text, ...], BeforeValidator(_named)] = ()
    #: Of a mixture, names of stacked experts, or of the module that has them ("experts"): each expert gets
    #: low-rank matrices of its own.
    target_parameters: tuple[Text, ...] = ()
    #: Scale by alpha / sqrt(r) instead of alpha / r.
    use_rslora: bool = False
    #: Modules that are trained in full beside the adapter.
    modules_to_save: tuple[Text, ...] = ()
    #: As an adapter that is served upon the base model, or as whole models.
    publish: Literal["adapter", "merged"] = "adapter"
    #: The folder of an adapter as peft saves it, on the trainer: the run begins with its weights, not with
    #: random ones. r, alpha, use_rslora, what it is of and modules_to_save have to be its own; on a machine
    #: that has the folder they may be left out.
    initial_adapter: Text | None = None

    @rule
    def _begins_what_is_trained(self) -> None:
        if self.initial_adapter is not None and not self.enabled and "enabled" in self.model_fields_set:
            raise ValueError(
                f"initial_adapter = {self.initial_adapter!r} is where an adapter begins, and enabled = false "
                "trains none; set enabled = true, or remove initial_adapter"
            )

    @rule
    def _is_served(self) -> None:
        for key in self.unserved:
            raise ValueError(f'{key} are no part of a served adapter; set publish = "merged", or remove them')

    @rule
    def _drops_nothing_out_of_experts(self) -> None:
        if self.drops_out_of_experts:
            raise ValueError(
                f"dropout = {self.dropout:g} is not for stacked experts; set dropout = 0, or remove "
                "target_parameters"
            )

    @property
    def drops_out_of_experts(self) -> bool:
        """Whether something is to be dropped out where that cannot be."""
        return bool(self.target_parameters and self.dropout)

    @property
    def unserved(self) -> list[str]:
        """Keys of what is trained and would not be published."""
        beyond = ("modules_to_save", "target_parameters")
        return [key for key in beyond if getattr(self, key)] if self.publish == "adapter" else []


def lora_spec(config: LoraConfig) -> LoraSpec | None:
    """As it travels; None where the table is off."""
    if not config.enabled:
        return None
    return LoraSpec(
        rank=config.r,
        alpha=config.alpha,
        dropout=config.dropout,
        target_modules=config.target_modules,
        target_parameters=config.target_parameters,
        rslora=config.use_rslora,
        modules_to_save=config.modules_to_save,
        publish_merged=config.publish == "merged",
        initial_adapter=config.initial_adapter or "",
    )
