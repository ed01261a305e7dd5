"""What one pass of samples through the model found, put together from its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quartet_trainer.loss.own_metrics import OwnMetrics
from quartet_trainer.sample import Floats, Sample


@dataclass(slots=True)
class Pass:
    """What a pass found: for each sample the values of its covered positions, and the loss of all."""

    logprobs: list[Floats]
    #: What the pass measured (head.Measure): entropies, unless it asked for something else.
    measured: list[Floats]
    loss: float = 0.0
    #: What the routers of a mixture of experts did; None for another model.
    routing: Tensor | None = None
    #: What a loss of one's own reported; None for another loss.
    own: OwnMetrics | None = None

    @classmethod
    def over(cls, samples: Sequence[Sample]) -> Pass:
        """Nothing yet."""
        empty = np.empty(0, np.float32)
        return cls([empty] * len(samples), [empty] * len(samples))

    def keep(
        self, samples: Sequence[Sample], members: Sequence[int], logp_K: Tensor, measured_K: Tensor
    ) -> None:
        """Take the values of a micro-batch apart."""
        if not members:
            return
        ends = np.cumsum([len(samples[member].covered_K) for member in members])[:-1]
        for target, values in ((self.logprobs, logp_K), (self.measured, measured_K)):
            for member, part in zip(members, np.split(values.cpu().numpy(), ends), strict=True):
                target[member] = part
