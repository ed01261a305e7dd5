"""Gradients of several batches, accumulated until a step takes them.

1. The gradients of a batch join the accumulated ones whole, when its last micro-batch is through, or not at
   all.
2. Sums are taken in a fixed order: equal batches in equal order give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quartet_trainer.ranks.alone import Ranks
from quartet_trainer.ranks.layout import is_whole, like


class Gradients:
    """The gradients of named parameters."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], ranks: Ranks) -> None:
        self._parameters, self._ranks = dict(parameters), ranks

    @contextmanager
    def joined(self) -> Iterator[None]:
        """What backward passes inside leave is added to what stood there; nothing is, when they fail."""
        before = self._replace([None] * len(self._parameters))
        try:
            yield
            self._ranks.sum_gradients([one for one in self._parameters.values() if is_whole(one)])
            # Memory for all of them is here before the first is added to.
            added = [_of_a_batch(parameter) for parameter in self._parameters.values()]
        except BaseException:
            self._replace(before)
            raise
        sums = (new if held is None else held.add_(new) for held, new in zip(before, added, strict=True))
        self._replace(list(sums))

    def taken(self) -> dict[str, Tensor]:
        """What is accumulated, by name; empty after a step."""
        return {name: one.grad for name, one in self._parameters.items() if one.grad is not None}

    def restore(self, gradients: Mapping[str, Tensor]) -> None:
        """Put back what was taken."""
        for name, parameter in self._parameters.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else like(gradient, parameter)

    def _replace(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        held = []
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            held.append(parameter.grad)
            parameter.grad = gradient
        return held


def _of_a_batch(parameter: nn.Parameter) -> Tensor:
    # A parameter that no loss reached still counts as having a gradient: the batch was applied.
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
