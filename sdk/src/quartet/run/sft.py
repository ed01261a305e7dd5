"""What supervised fine-tuning is: the TOML of `quartet sft @ file.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from quartet.config import Config
from quartet.run.learning import CheckpointConfig
from quartet.run.values import Count, Decay, NonNegative, Positive, PositiveCount, Seed, Table, Text

#: A chat has these; a message of another role has no place in a chat template.
Role = Literal["system", "user", "assistant", "tool"]


class SftConfig(Config):
    """A model, a file of chats, and how it is trained on them."""

    model: Text
    #: JSON lines, each with "messages": [{"role", "content", ...}, ...].
    data: Path
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
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: Count = 0
    max_grad_norm: NonNegative = 1.0
    weight_decay: NonNegative = 0.0
    adam_beta1: Decay = 0.9
    adam_beta2: Decay = 0.999
    microbatch_tokens: Count = 0
    #: When the trainer saves its state, from which --resume goes on.
    ckpt: CheckpointConfig = CheckpointConfig()
    #: The trainer's own configuration.
    trainer: Table

    @pydantic.model_validator(mode="after")
    def _ends_once(self) -> Self:
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("epochs and max_steps both say when it ends; give one of the two")
        return self

    def steps(self, chats: int) -> int:
        """Optimizer steps over so many chats."""
        if self.max_steps is not None:
            return self.max_steps
        return max(1, round((self.epochs or 1.0) * chats / self.batch_size))
