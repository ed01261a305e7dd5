"""What defines a loss, as values."""

from __future__ import annotations

from enum import StrEnum

import pydantic

from quartet_trainer.spec.value import Value


class Ratio(StrEnum):
    """What is done with the ratio between trainer and sampler; CROSS_ENTROPY has none."""

    CISPO = "cispo"
    PPO = "ppo"
    NONE = "none"
    CROSS_ENTROPY = "cross_entropy"


class LossSpec(Value):
    """A loss as values. See loss.py for the formulas."""

    ratio: Ratio
    clip_low: float | None = pydantic.Field(default=None, ge=0)
    clip_high: float | None = pydantic.Field(default=None, gt=0)
    temperature: float = pydantic.Field(default=1.0, gt=0)
