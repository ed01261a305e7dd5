"""Prompts: which task of its environment a group gets.

1. The answer is a function of the seed, the environment and how many groups it was given before: nothing to
   save beyond what the journal says anyway.
2. Every task comes once per epoch, in an order shuffled anew each epoch. An infinite environment is read in
   order.

Pure.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """An environment to draw from. `size` is the number of its training tasks; None where they never end."""

    label: str
    size: int | None


class Prompts:
    """The order of the tasks of a run's environments."""

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        assert sources and all(source.size is None or source.size > 0 for source in sources)
        self._sources = tuple(sources)
        self._seed = seed
        # The epoch that each environment is in, and its order.
        self._epochs: dict[int, tuple[int, array[int]]] = {}

    def task(self, environment: int, turn: int) -> int:
        """Of the environment's group with that number among its own, from 0."""
        source = self._sources[environment]
        if source.size is None:
            return turn
        epoch, position = divmod(turn, source.size)
        if self._epochs.get(environment, (None, None))[0] != epoch:
            self._epochs[environment] = epoch, self._shuffled(environment, epoch, source.size)
        return self._epochs[environment][1][position]

    def _shuffled(self, environment: int, epoch: int, size: int) -> array[int]:
        order = array("L", range(size))
        # The index keeps two entries of one environment from walking in step.
        label = self._sources[environment].label
        random.Random(f"epoch/{self._seed}/{environment}/{label}/{epoch}").shuffle(order)
        return order
