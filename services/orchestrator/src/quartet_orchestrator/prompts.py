"""Prompts: which task of its environment a group gets.

1. The answer is a function of the seed, the environment and how many groups it was given before: nothing to
   save beyond what the journal says anyway.
2. Every task comes once per epoch, in an order shuffled anew each epoch. An infinite environment is read in
   order.
3. An epoch is shuffled once, before its first task is needed: a million tasks take a second, so whoever has
   an event loop lets a thread do that.

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
        # Of each environment the epochs that were shuffled last, and their orders.
        self._epochs: dict[int, dict[int, array[int]]] = {}

    def task(self, environment: int, turn: int) -> int:
        """Of the environment's group with that number among its own, from 0."""
        source = self._sources[environment]
        if source.size is None:
            return turn
        if not self.at_hand(environment, turn, turn):
            self.shuffle(environment, turn, turn)
        epoch, position = divmod(turn, source.size)
        return self._epochs[environment][epoch][position]

    def at_hand(self, environment: int, first: int, last: int) -> bool:
        """Whether the orders of these turns, and of those between them, are there."""
        known = self._epochs.get(environment, {})
        return all(epoch in known for epoch in self._epochs_of(environment, first, last))

    def shuffle(self, environment: int, first: int, last: int) -> None:
        """Puts the orders of these turns, and of those between them, at hand."""
        known = self._epochs.get(environment, {})
        self._epochs[environment] = {
            epoch: known[epoch] if epoch in known else self._shuffled(environment, epoch)
            for epoch in self._epochs_of(environment, first, last)
        }

    def _epochs_of(self, environment: int, first: int, last: int) -> range:
        size = self._sources[environment].size
        return range(0) if size is None else range(first // size, last // size + 1)

    def _shuffled(self, environment: int, epoch: int) -> array[int]:
        label, size = self._sources[environment].label, self._sources[environment].size
        assert size is not None
        order = array("L", range(size))
        # The index keeps two entries of one environment from walking in step.
        random.Random(f"epoch/{self._seed}/{environment}/{label}/{epoch}").shuffle(order)
        return order
