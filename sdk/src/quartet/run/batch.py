"""What the steps of a run are made of: how many rollouts of which groups, and how far ahead they are sampled.

1. A batch is whole groups, and a group has room to run.
"""

from __future__ import annotations

from typing import Annotated

import pydantic
from pydantic import Field

from quartet.config import Config
from quartet.run.hosted import MAX_GROUP, GroupSize
from quartet.run.values import Count, PositiveCount, Seed, Text

#: More staleness than this means that the trainer keeps more than two dozen copies of the model.
MAX_OFF_POLICY_STEPS = 24
#: An evaluation may have more rollouts than a batch.
MIN_AT_ONCE = 1024


class BatchConfig(Config):
    """A run's steps."""

    #: A Hugging Face folder or hub id; of a submitted run on the trainer's machine.
    model: Text
    #: Steps, each of one batch.
    max_steps: Count = 100
    #: Rollouts of one task, which form a group and are compared.
    rollouts_per_example: GroupSize = 8
    #: Rollouts of a step; a multiple of rollouts_per_example.
    batch_size: PositiveCount = 128
    #: Of others' files. Here batch_size is all of an optimizer step, whatever it takes to compute it.
    gradient_accumulation_steps: PositiveCount = 1
    #: What the order of tasks, the initial weights of an adapter and its dropout come from; which tokens are
    #: sampled, only sampling.seed decides.
    seed: Seed = 0
    #: How many steps a token may be older than the policy that learns from it.
    max_off_policy_steps: Annotated[int, Field(ge=0, le=MAX_OFF_POLICY_STEPS, strict=True)] = 1
    #: Rollouts under way at once, those of evaluations too; default: as many as (max_off_policy_steps + 1)
    #: batches have, and no more than keep the places of the environment hosts filled; MIN_AT_ONCE at least.
    max_concurrent: PositiveCount | None = None
    #: Tasks whose prompts are longer are not trained on.
    max_prompt_tokens: PositiveCount | None = None
    #: Of how many members of each group the conversation is kept with the rollout.
    messages_of_members: Annotated[int, Field(ge=0, le=MAX_GROUP, strict=True)] = 1

    @property
    def groups_per_batch(self) -> int:
        """Groups of rollouts_per_example rollouts that one batch consists of."""
        return self.batch_size // self.rollouts_per_example

    @property
    def at_once(self) -> int:
        """Rollouts under way at most: by default those of all batches that are sampled side by side."""
        return self.max_concurrent or max(MIN_AT_ONCE, (self.max_off_policy_steps + 1) * self.batch_size)

    @pydantic.field_validator("gradient_accumulation_steps")
    @classmethod
    def _accumulates_by_itself(cls, steps: int) -> int:
        if steps != 1:
            raise ValueError(
                "batch_size is all of an optimizer step here, and the trainer adds up the gradients of as "
                "many micro-batches as microbatch_tokens asks for; remove it, and set microbatch_tokens to "
                "what fits into memory"
            )
        return steps

    @pydantic.field_validator("batch_size")
    @classmethod
    def _whole_groups(cls, batch_size: int, info: pydantic.ValidationInfo) -> int:
        group = info.data.get("rollouts_per_example", 1)
        if batch_size % group:
            below = batch_size // group * group
            choices = f"{below} or {below + group}" if below else f"{group}"
            raise ValueError(f"rollouts_per_example = {group} does not divide it; set it to {choices}")
        return batch_size

    @pydantic.field_validator("max_concurrent")
    @classmethod
    def _group_fits(cls, max_concurrent: int | None, info: pydantic.ValidationInfo) -> int | None:
        group = info.data.get("rollouts_per_example", 1)
        if max_concurrent is not None and max_concurrent < group:
            raise ValueError(f"a group has rollouts_per_example = {group} rollouts; set at least {group}")
        return max_concurrent
