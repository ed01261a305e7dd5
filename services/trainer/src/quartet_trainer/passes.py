"""Passes of samples through the model, micro-batch by micro-batch: to train on them, or to score them.

1. Micro-batches follow from the samples alone and come in one order: equal calls give equal bits.
2. Scoring under other weights than the live ones touches neither the model nor its gradients, and computes in
   float32.
3. `progress` is called after every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.loss import token_losses
from quartet_trainer.packing import MicroBatch, pack
from quartet_trainer.publish import Snapshot
from quartet_trainer.sample import Floats, Sample
from quartet_trainer.spec import LossSpec


@dataclass(frozen=True, slots=True)
class Machine:
    """What the service's configuration says about computing."""

    device: torch.device
    microbatch_tokens: int
    row_tokens: int
    hub: bool


@dataclass(slots=True)
class Pass:
    """What a pass found: for each sample the values of its covered positions, and the loss of all."""

    logprobs: list[Floats]
    entropies: list[Floats]
    loss: float = 0.0

    @classmethod
    def over(cls, samples: Sequence[Sample]) -> Pass:
        """Nothing yet."""
        empty = np.empty(0, np.float32)
        return cls([empty] * len(samples), [empty] * len(samples))

    def keep(
        self, samples: Sequence[Sample], members: Sequence[int], logp_K: Tensor, entropy_K: Tensor
    ) -> None:
        """Take the values of a micro-batch apart."""
        ends = np.cumsum([len(samples[member].covered_K) for member in members])[:-1]
        for target, values in ((self.logprobs, logp_K), (self.entropies, entropy_K)):
            for member, part in zip(members, np.split(values.cpu().numpy(), ends), strict=True):
                target[member] = part


class Passes:
    """One model's passes."""

    def __init__(
        self, policy: PolicyForward, machine: Machine, budget_tokens: int, progress: Callable[[], None]
    ) -> None:
        self._policy, self._machine = policy, machine
        self._budget_tokens, self._progress = budget_tokens, progress

    def train(
        self, samples: Sequence[Sample], weights: Sequence[Floats], loss: LossSpec, normalizer: float
    ) -> Pass:
        """Forward and backward; the gradients are left on the parameters."""
        done = Pass.over(samples)
        moving = [index for index, weight in enumerate(weights) if weight.any()]
        still = sorted(set(range(len(samples))) - set(moving))
        for members, learns in ((moving, True), (still, False)):
            # Where every weight is zero so is the gradient: the forward pass alone gives the diagnostics.
            for batch in self._pack(samples, members):
                with torch.set_grad_enabled(learns):
                    logp_K, entropy_K = self._policy(batch, loss.temperature)
                    sampled_K = self._joined([samples[m].logprobs_K for m in batch.members])
                    weights_K = self._joined([weights[m] for m in batch.members])
                    assert weights_K is not None
                    total = token_losses(loss, logp_K, sampled_K, weights_K).sum() / normalizer
                if learns:
                    torch.autograd.backward(total)
                done.loss += float(total.detach())
                done.keep(samples, batch.members, logp_K.detach(), entropy_K)
                self._progress()
        return done

    def score(self, samples: Sequence[Sample], weights: Snapshot | None, temperature: float) -> list[Floats]:
        """Log-probabilities of the covered positions of each sample; weights None: the live ones."""
        done = Pass.over(samples)
        replaced = {}
        if weights is not None:
            # Moved as they are and widened there: in one call the CPU would widen them first.
            replaced = {
                f"model.{name}": tensor.to(self._machine.device).float() for name, tensor in weights.items()
            }
        with torch.no_grad():
            for batch in self._pack(samples, range(len(samples))):
                if weights is None:
                    output = self._policy(batch, temperature)
                else:
                    output = functional_call(self._policy, replaced, (batch, temperature, True))
                done.keep(samples, batch.members, *output)
                self._progress()
        return done.logprobs

    def _pack(self, samples: Sequence[Sample], members: Sequence[int]) -> list[MicroBatch]:
        return pack(samples, members, self._budget_tokens, self._machine.row_tokens)

    def _joined(self, arrays: Sequence[Floats | None]) -> Tensor | None:
        present = [array for array in arrays if array is not None]
        if len(present) < len(arrays):
            return None
        return torch.from_numpy(np.concatenate(present)).to(self._machine.device)
