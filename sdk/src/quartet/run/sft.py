"""What supervised fine-tuning is: the TOML of `quartet sft @ file.toml`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quartet.config import Config, ConfigError
from quartet.config.model import rule
from quartet.counted import counted
from quartet.run.learning import (
    MAX_STEPS,
    CheckpointConfig,
    LearningConfig,
    Schedule,
    of_the_optimizer,
    of_the_schedule,
)
from quartet.run.lora import LoraConfig
from quartet.run.mlflow import MlflowConfig
from quartet.run.sft_names import AS_TABLES, REMEDIES, TABLES_OF_OTHERS
from quartet.run.switched import outdone_by_a_key_of_it
from quartet.run.tensorboard import TensorboardConfig
from quartet.run.values import Count, FileTable, NonNegative, Positive, PositiveCount, Seed, Text
from quartet.run.values import Fraction as Share
from quartet.run.wandb import WandbConfig

#: A chat has these; a message of another role has no place in a chat template.
Role = Literal["system", "user", "assistant", "tool"]
#: What of a chat is learned: what roles say, or every token of what its template makes of it.
Learns = Literal["roles", "everything"]
#: What becomes of a chat of more than max_tokens.
Overlong = Literal["leave_out", "cut", "refuse"]
#: Of what a step takes some: of chats, or of rows that chats are put into.
Packing = Literal["drawn", "best_fit"]


class MeasureConfig(Config):
    """When the loss on the validation set is measured, by the names of a run's evaluations."""

    #: Before the first step.
    before: bool = True
    #: After the last.
    after: bool = True
    #: Steps from one time to the next between; 0: none.
    interval: Count = 0
    #: In place of interval: passes over the data from one time to the next; a part of one is 0.5.
    epochs: Positive | None = None

    @rule
    def _is_repeated_once(self) -> Iterator[str]:
        yield from _both_repeat(self)


class SavingConfig(CheckpointConfig):
    """When the trainer saves its state, as of a run, or by passes over the data."""

    #: In place of interval: passes over the data from one saved state to the next; a part of one is 0.5.
    epochs: Positive | None = None

    @rule
    def _is_repeated_once(self) -> Iterator[str]:
        yield from _both_repeat(self)
        if self.epochs is not None and self.keep_interval is not None:
            yield "keep_interval counts steps, and epochs passes; set interval in place of epochs"


def _both_repeat(config: MeasureConfig | SavingConfig) -> Iterator[str]:
    usual = type(config).model_fields["interval"].default
    if config.epochs is not None and config.interval != usual:
        yield "interval and epochs both say how often; give one of the two"


class LessonsConfig(Config):
    """What is learned, and how often."""

    #: A Hugging Face folder, or a hub id that the cache holds.
    model: Text
    #: A file, a folder of them, or a pattern: JSON lines, a list of JSON, Parquet or Arrow; chats or text
    #: (docs/algorithms.md).
    data: Path
    #: Likewise, and never learned: the loss on them is measured.
    validation: Path | None = None
    #: Whose messages the loss covers.
    roles: Annotated[tuple[Role, ...], Field(min_length=1)] = ("assistant",)
    #: "roles", or "everything": every token of a chat but the first, what its template writes between
    #: messages, too; of a prompt with a completion those of the completion.
    learns: Learns = "roles"
    #: Of a prompt with a completion, learn the prompt like the completion.
    learn_prompts: bool = False
    #: Longer ones are dealt with as overlong says. A text is cut into pieces, but for "cut".
    max_tokens: PositiveCount = 4096
    #: "leave_out", "cut" behind the first max_tokens, or "refuse" the data. The first two are counted.
    overlong: Overlong = "leave_out"
    #: Passes over the data; a part of one is 0.5. Not with max_steps.
    epochs: Positive | None = None
    #: Optimizer steps; absent: as many as one pass takes.
    max_steps: PositiveCount | None = None
    #: Chats of a step.
    batch_size: PositiveCount = 32
    #: In place of batch_size: a step has as many whole chats as are so many tokens together at most. 0: it
    #: has batch_size chats.
    batch_tokens: Count = 0
    #: The last step of each pass has what is left of it; or else it goes on with the next pass.
    short_batches: bool = False
    #: "drawn": a step takes chats. "best_fit": chats are put into rows of at most max_tokens tokens, as TRL
    #: does that, and a step takes rows: batch_size and batch_tokens count these.
    packing: Packing = "drawn"
    #: What the order of the chats and everything drawn at random come from.
    seed: Seed = 0


class SftConfig(LearningConfig, LessonsConfig):
    """A model, a file of chats, and how it is trained on them."""

    OTHER_NAMES: ClassVar = REMEDIES
    AS_TABLES: ClassVar = AS_TABLES
    TABLES_OF_OTHERS: ClassVar = TABLES_OF_OTHERS

    learning_rate: NonNegative = 1e-5
    lr_scheduler: Schedule = "cosine"
    warmup_steps: Annotated[int, Field(ge=0, lt=MAX_STEPS, strict=True)] = 0
    #: In place of warmup_steps: a share of all steps.
    warmup_ratio: Share = 0.0
    #: When the trainer saves its state, from which --resume goes on.
    ckpt: SavingConfig = SavingConfig()
    lora: LoraConfig = LoraConfig()
    eval: MeasureConfig = MeasureConfig()
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()
    #: The trainer's own configuration.
    trainer: FileTable

    @classmethod
    def outdone(cls, key: str, value: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Either of two says when it ends, and what a step has; and no table is off in silence."""
        pairs = (
            ("epochs", "max_steps"),
            ("batch_size", "batch_tokens"),
            ("warmup_steps", "warmup_ratio"),
            ("eval.interval", "eval.epochs"),
            ("ckpt.interval", "ckpt.epochs"),
        )
        others = tuple(other for pair in pairs if key in pair for other in pair if other != key)
        return others or outdone_by_a_key_of_it(cls, key, before)

    @classmethod
    def outdone_by_a_file(cls, key: str, value: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Likewise no table is off in silence."""
        return outdone_by_a_key_of_it(cls, key, before)

    @rule
    def _ends_once(self) -> Iterator[str]:
        if self.epochs is not None and self.max_steps is not None:
            yield "epochs and max_steps both say when it ends; give one of the two"

    @rule
    def _measures_a_step_once(self) -> Iterator[str]:
        usual = type(self).model_fields["batch_size"].default
        if self.batch_tokens and self.batch_size != usual:
            yield "batch_size and batch_tokens both say what a step has; give one of the two"
        if 0 < self.batch_tokens < self.max_tokens:
            yield (
                f"batch_tokens = {self.batch_tokens} has no room for a {self.drawn} of max_tokens = "
                f"{self.max_tokens}; set max_tokens to no more than that, or batch_tokens to more"
            )

    @rule
    def _covers_once(self) -> Iterator[str]:
        usual = type(self).model_fields["roles"].default
        if self.learns == "everything" and self.roles != usual:
            yield 'roles and learns = "everything" both say what of a chat is learned; give one of the two'

    @rule
    def _schedule_has_it(self) -> Iterator[str]:
        if self.warmup_steps and self.warmup_ratio:
            yield "warmup_steps and warmup_ratio both say how long the rate rises; give one of the two"
        elif self.max_steps is None:
            yield from of_the_schedule(self, None)
        else:
            yield from of_the_schedule(*self.scheduled(self.max_steps))

    @rule
    def _optimizer_has_it(self) -> Iterator[str]:
        yield from of_the_optimizer(self)

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

    @property
    def drawn(self) -> str:
        """What a step takes some of; with an s, several."""
        return "row" if self.packing == "best_fit" else "chat"

    def steps(self, many: int, in_batches: Callable[[int], int] | None = None) -> int:
        """Optimizer steps over so many chats or rows, of which none is left out. `in_batches`: how many so
        many are, where batch_size alone does not say. Raises ConfigError, also where the schedule has no room
        in them."""
        if self.max_steps is not None:
            return self.max_steps
        epochs = self.epochs or 1.0
        steps = epochs * many / (1 if in_batches else self.batch_size)
        if steps > MAX_STEPS:
            raise ConfigError(
                f"epochs = {self.epochs} over {many} {self.drawn}s are {steps:.3g} steps, at most "
                f"{MAX_STEPS} can be counted; set a smaller number, or max_steps"
            )
        learned = math.ceil(as_written(epochs) * many)
        whole = in_batches(learned) if in_batches else math.ceil(learned / self.batch_size)
        if wrong := list(of_the_schedule(*self.scheduled(whole))):
            is_or_are = "is" if many == 1 else "are"
            raise ConfigError(f"{wrong[0]}: {counted(many, self.drawn)} {is_or_are} {counted(whole, 'step')}")
        return whole

    def scheduled(self, steps: int) -> tuple[SftConfig, int]:
        """Itself with its warm-up in steps, and what the schedule of so many is laid over: a step after the
        warm-up is counted, too."""
        warmup = math.ceil(as_written(self.warmup_ratio) * steps) or self.warmup_steps
        config = self.model_copy(update={"warmup_steps": warmup, "warmup_ratio": 0.0})
        return config, max(steps, warmup + 1)


def as_written(number: float) -> Fraction:
    """Exactly what its digits say: 1.1 * 100 is above 110."""
    return Fraction(str(number))
