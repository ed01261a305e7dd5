"""What becomes of the rewards of a group: keys of the [algorithm] table that are the orchestrator's.

1. A setting that looks for rewards is refused where none are compared, or read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from quartet.config import Config
from quartet.config.model import rule
from quartet.run.algorithm_tables import OverlongPenaltyConfig
from quartet.run.values import Number, Text

#: A batch of tasks that are all too hard or too easy is sampled so many times over, at most.
MAX_RESAMPLE, DEFAULT_RESAMPLE = 1000, 10


class CreditConfig(Config):
    """From rewards to advantages."""

    #: From rewards to advantages.
    advantage: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "max_rl", "gdpo", "none", "zero", "custom"
    ] = "grpo"
    #: advantage = "gdpo": what each reward function weighs, by name; others weigh 1.
    reward_weights: dict[str, Number] = Field(default_factory=dict)
    #: advantage = "custom": a name of `advantages` in the orchestrator's configuration.
    custom_advantage: Text | None = None
    #: Rollouts that a limit cut count for the group's baseline, and not for the loss.
    overlong_filtering: bool = False
    #: Rewards are lowered by length before they are compared; absent: they are not.
    overlong_penalty: OverlongPenaltyConfig | None = None
    #: Rollouts whose advantages are 0 count for the group's baseline, and not for the loss.
    zero_advantage_filtering: bool = False
    #: Groups whose rewards are all alike teach nothing: fresh ones take their places, ...
    dynamic_sampling: bool = False
    #: ... so many times for one place; then such a group is kept; absent: 10.
    max_resample: Annotated[int, Field(ge=1, le=MAX_RESAMPLE, strict=True)] | None = None

    @property
    def compares(self) -> bool:
        """Whether advantages come of comparing the rewards of a group."""
        return self.advantage not in ("none", "zero")

    @property
    def resamples(self) -> int:
        """How often a place gets a fresh group because the one before it taught nothing."""
        return (self.max_resample or DEFAULT_RESAMPLE) if self.dynamic_sampling else 0

    @rule
    def _penalty_is_credited(self) -> Iterator[str]:
        if self.overlong_penalty is not None and self.advantage == "zero":
            yield ('overlong_penalty lowers rewards, which advantage = "zero" does not read; remove it')

    @rule
    def _functions_are_compared(self) -> Iterator[str]:
        if self.reward_weights and self.advantage != "gdpo":
            yield (
                'reward_weights are read by advantage = "gdpo"; choose it, or remove them: others go by the '
                "environment's own sum"
            )
        if self.overlong_penalty is not None and self.advantage == "gdpo":
            yield (
                'overlong_penalty lowers the sum of rewards, and advantage = "gdpo" compares each function '
                "for itself; remove it, and have a reward function count the length"
            )

    @rule
    def _spread_is_wanted(self) -> Iterator[str]:
        if self.dynamic_sampling and not self.compares:
            yield (
                f'dynamic_sampling looks for rewards that differ, and advantage = "{self.advantage}" learns '
                "without; set dynamic_sampling to false"
            )
        if self.zero_advantage_filtering and not self.compares:
            yield (
                f"zero_advantage_filtering looks for rewards that differ, and advantage = "
                f'"{self.advantage}" learns without; remove it'
            )
        if self.max_resample is not None and not self.dynamic_sampling:
            yield ("max_resample bounds dynamic_sampling, which is off; set that to true, or remove it")
