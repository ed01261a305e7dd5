"""The coefficient of the entropy bonus, adapted so that the entropy keeps above a target.

1. After each optimizer step that was taken, e the mean entropy over all tokens since the step before:
   coefficient += delta where e <= target, else coefficient -= delta, within [0, MAX_ADAPTED_ENTROPY_COEF].
   (Skywork-OR1, arXiv 2505.22312, section 4.)
2. It acts in the batches after a step that found e <= target, and in no others; so in none of the first step.
3. It begins at the entropy_coef of the first loss that has a target, and belongs to the run's state: a
   restored run continues with it.
4. A loss without a target has the entropy_coef that it says, and changes nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quartet_trainer.spec import LossSpec
from quartet_trainer.spec.loss import ENTROPY_COEF_DELTA, MAX_ADAPTED_ENTROPY_COEF


@dataclass(slots=True)
class EntropyControl:
    """The adapted coefficient, and what was measured since the last step."""

    coefficient: float | None = None
    target: float = math.inf
    delta: float = ENTROPY_COEF_DELTA
    #: Whether the step before found no more than the target.
    is_low: bool = False
    entropy_sum: float = 0.0
    tokens: int = 0

    def of(self, loss: LossSpec) -> float:
        """The coefficient to use for a loss."""
        if loss.target_entropy is None:
            return loss.entropy_coef
        return self.coefficient if self.is_low and self.coefficient is not None else 0.0

    def observe(self, loss: LossSpec, mean_entropy: float, tokens: int) -> None:
        """A batch was applied."""
        if loss.target_entropy is None:
            return
        if self.coefficient is None:
            self.coefficient = loss.entropy_coef
        delta = loss.entropy_coef_delta
        self.target, self.delta = loss.target_entropy, ENTROPY_COEF_DELTA if delta is None else delta
        self.entropy_sum += mean_entropy * tokens
        self.tokens += tokens

    def step(self, taken: bool) -> None:
        """An optimizer step was taken, or skipped."""
        if taken and self.tokens and math.isfinite(self.entropy_sum):
            assert self.coefficient is not None
            self.is_low = self.entropy_sum / self.tokens <= self.target
            moved = self.coefficient + (self.delta if self.is_low else -self.delta)
            self.coefficient = min(MAX_ADAPTED_ENTROPY_COEF, max(0.0, moved))
        self.entropy_sum, self.tokens = 0.0, 0

    def meta(self) -> dict[str, Any]:
        """What a state keeps."""
        return asdict(self)

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any]) -> EntropyControl:
        """As a state kept it."""
        return cls(**meta)
