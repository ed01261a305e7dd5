"""What supervised fine-tuning is: the TOML of `quartet sft @ file.toml`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field

from quartet.config import Config, ConfigError
from quartet.config.model import rule
from quartet.run.learning import (
    ADAM_EPSILON,
    CheckpointConfig,
    Optimizer,
    Schedule,
    check_optimizer,
    check_schedule,
)
from quartet.run.lora import LoraConfig
from quartet.run.sft_names import AS_TABLES, REMEDIES
from quartet.run.values import Count, Decay, NonNegative, Positive, PositiveCount, Seed, Table, Text
from quartet.run.wandb import WandbConfig

#: A chat has these; a message of another role has no place in a chat template.
Role = Literal["system", "user", "assistant", "tool"]
#: As of max_steps: the contract counts steps in 32 bits.
MAX_STEPS = 2**32 - 1


class MeasureConfig(Config):
    """When the loss on the validation set is measured, by the names of a run's evaluations."""

    before: bool = True
    after: bool = True
    #: Steps from one time to the next between; 0: none.
    interval: Count = 0


class SftConfig(Config):
    """A model, a file of chats, and how it is trained on them."""

    OTHER_NAMES: ClassVar = REMEDIES
    AS_TABLES: ClassVar = AS_TABLES

    model: Text
    #: JSON lines, or a list of JSON: chats or text (docs/algorithms.md).
    data: Path
    #: Likewise, and never learned: the loss on them is measured.
    validation: Path | None = None
    #: Whose messages the loss covers.
    roles: Annotated[tuple[Role, ...], Field(min_length=1)] = ("assistant",)
    #: Longer chats are left out, and counted.
    max_tokens: PositiveCount = 4096
    #: Passes over the data; a part of one is 0.5. Not with max_steps.
    epochs: Positive | None = None
    max_steps: PositiveCount | None = None
    batch_size: PositiveCount = 32
    seed: Seed = 0
    learning_rate: NonNegative = 1e-5
    lr_scheduler: Schedule = "cosine"
    #: Steps over which the rate rises.
    warmup_steps: Annotated[int, Field(ge=0, lt=MAX_STEPS, strict=True)] = 0
    #: The last steps of warmup_stable_decay, in which the rate falls.
    decay_steps: Count = 0
    min_lr: NonNegative = 0.0
    optimizer: Optimizer = "adamw"
    momentum: Decay | None = None
    adamw_learning_rate: NonNegative | None = None
    max_grad_norm: NonNegative = 1.0
    weight_decay: NonNegative = 0.0
    adam_beta1: Decay = 0.9
    adam_beta2: Decay = 0.999
    adam_epsilon: Positive = ADAM_EPSILON
    microbatch_tokens: Count = 0
    #: When the trainer saves its state, from which --resume goes on.
    ckpt: CheckpointConfig = CheckpointConfig()
    lora: LoraConfig = LoraConfig()
    eval: MeasureConfig = MeasureConfig()
    wandb: WandbConfig = WandbConfig()
    #: The trainer's own configuration.
    trainer: Table

    @classmethod
    def outdone(cls, key: str, value: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Either of the two says when it ends."""
        return {"epochs": ("max_steps",), "max_steps": ("epochs",)}.get(key, ())

    @pydantic.model_validator(mode="after")
    def _ends_once(self) -> Self:
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("epochs and max_steps both say when it ends; give one of the two")
        return self

    @rule
    def _schedule_has_it(self) -> None:
        check_schedule(self, None if self.max_steps is None else self._scheduled(self.max_steps))

    @rule
    def _optimizer_has_it(self) -> None:
        check_optimizer(self)

    @rule
    def _has_what_it_measures(self) -> None:
        given = [key for key in type(self.eval).model_fields if key in self.eval.model_fields_set]
        if given and self.validation is None:
            value = getattr(self.eval, given[0])
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ValueError(
                f"eval.{given[0]} = {shown} has nothing to measure; set validation to a file of chats, or "
                "remove [eval]"
            )

    def steps(self, chats: int) -> int:
        """Optimizer steps over so many chats, the last of which goes on with the next pass: none is left out.
        Raises ConfigError, also where the schedule has no room in them."""
        if self.max_steps is not None:
            return self.max_steps
        epochs = self.epochs or 1.0
        steps = epochs * chats / self.batch_size
        if steps > MAX_STEPS:
            raise ConfigError(
                f"epochs = {self.epochs} over {chats} chats are {steps:.3g} steps, at most {MAX_STEPS} can "
                "be counted; set a smaller number, or max_steps"
            )
        whole = math.ceil(Fraction(str(epochs)) * chats / self.batch_size)  # 1.1 * 100 is above 110
        try:
            check_schedule(self, self._scheduled(whole))
        except ValueError as error:
            raise ConfigError(f"{error}: {chats} chats are {whole} steps") from None
        return whole

    def scheduled_steps(self, chats: int) -> int:
        """What the schedule is laid over: a step after the warm-up is counted, too. Raises ConfigError."""
        return self._scheduled(self.steps(chats))

    def _scheduled(self, steps: int) -> int:
        return max(steps, self.warmup_steps + 1)
