"""The [difficulty_filter] table: which groups of rollouts are worth training on.

Off, every complete group is trained on, but for what algorithm.dynamic_sampling takes out.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from quartet.config.model import rule
from quartet.run.credit import DEFAULT_RESAMPLE, MAX_RESAMPLE
from quartet.run.switched import SwitchedConfig
from quartet.run.values import NonNegative, Number


class DifficultyFilterConfig(SwitchedConfig):
    """Bounds on the rewards of a group; one outside of them is replaced by a fresh one."""

    #: Of the population of its rewards: 8 rollouts of which one earns 1 have 0.109. One whose rewards are all
    #: alike is out in any case.
    min_reward_variance: NonNegative = 0.0
    #: Of its mean.
    max_reward: Number | None = None
    #: Likewise of its mean.
    min_reward: Number | None = None
    #: So many times for one place of a batch; then such a group is kept.
    max_resample: Annotated[int, Field(ge=1, le=MAX_RESAMPLE, strict=True)] = DEFAULT_RESAMPLE

    @rule
    def _leaves_something(self) -> None:
        if self.min_reward is not None and self.max_reward is not None and self.min_reward >= self.max_reward:
            raise ValueError(
                f"min_reward = {self.min_reward} and max_reward = {self.max_reward} leave nothing between "
                "them; lower min_reward"
            )
