"""The coefficient of the divergence from the reference, adapted so that the divergence keeps to a target.

1. After each optimizer step that was taken: coefficient *= 1 + GAIN * clamp(kl / target - 1, -BOUND, BOUND),
   kl the mean over all tokens since the step before. (Fine-tuning language models from human preferences,
   arXiv 1909.08593, section 2.2, per step instead of per episode.)
2. It begins at the kl_coef of the first loss that has a target, and belongs to the run's state: a restored
   run continues with it.
3. A loss without a target has the kl_coef that it says, and changes nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quartet_trainer.spec import LossSpec

GAIN = 0.1
BOUND = 0.2


@dataclass(slots=True)
class KlControl:
    """The adapted coefficient, and what was measured since the last step."""

    coefficient: float | None = None
    target: float | None = None
    divergence_sum: float = 0.0
    tokens: int = 0

    def of(self, loss: LossSpec) -> float:
        """The coefficient to use for a loss."""
        if loss.target_kl is None or self.coefficient is None:
            return loss.kl_coef
        return self.coefficient

    def observe(self, loss: LossSpec, mean_divergence: float, tokens: int) -> None:
        """A batch was applied."""
        if loss.target_kl is None:
            return
        self.coefficient, self.target = self.of(loss), loss.target_kl
        self.divergence_sum += mean_divergence * tokens
        self.tokens += tokens

    def step(self, taken: bool) -> None:
        """An optimizer step was taken, or skipped."""
        if taken and self.tokens and math.isfinite(self.divergence_sum):
            assert self.coefficient is not None and self.target is not None
            error = self.divergence_sum / self.tokens / self.target - 1.0
            self.coefficient *= 1.0 + GAIN * min(BOUND, max(-BOUND, error))
        self.divergence_sum, self.tokens = 0.0, 0

    def meta(self) -> dict[str, Any]:
        """What a state keeps."""
        return asdict(self)

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Stand where a state was taken."""
        self.coefficient, self.target = meta["coefficient"], meta["target"]
        self.divergence_sum, self.tokens = float(meta["divergence_sum"]), int(meta["tokens"])
