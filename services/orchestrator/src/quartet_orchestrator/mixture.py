"""Mixture: which environment each place of the run belongs to, in proportion to the weights.

1. The answer is a function of the weights and the place's number alone: nothing to save, nothing to lose, and
   whatever group fills the place in the end, it is one of that environment. So what is trained has the
   proportions of the places, also where one environment fails or is resampled more often than another.
2. After any number p of places each environment has had its share w * p of them, to within less than one.

The rule is Tijdeman's (The chairman assignment problem, Discrete Mathematics 32, 1980): among those whose
share has grown by enough to be due, the one that would be late first. No rule has a smaller bound than this
one's, 1 - 1 / (2n - 2) for n environments.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


class Mixture:
    """The environments of a run's places; weights are above 0 and need not sum to 1."""

    def __init__(self, weights: Sequence[float]) -> None:
        assert weights and all(weight > 0 for weight in weights)
        exact = [Fraction(weight) for weight in weights]
        # The weights in whole numbers, which are added up several times as fast: a run that goes on counts
        # all of its places at once.
        common = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * common) for weight in exact]
        self._sum, self._multiple = sum(self._weights), math.lcm(*self._weights)
        # An environment may be early or late by 1 / `unit` less than a whole place.
        self._unit, self._slack = (2 * len(weights) - 2, 1) if len(weights) > 1 else (1, 0)
        # The environments of the places so far.
        self._order: list[int] = []
        self._counts = [0] * len(weights)
        self._due_at = [self._due(number) for number in range(len(weights))]
        self._late_at = [self._late(number) for number in range(len(weights))]

    def environment(self, place: int) -> int:
        """Of the place with that number in the run, from 0."""
        while len(self._order) <= place:
            self._next()
        return self._order[place]

    def _next(self) -> None:
        places = len(self._order) + 1
        due = (number for number, at in enumerate(self._due_at) if at <= places)
        chosen = min(due, key=self._late_at.__getitem__)
        self._order.append(chosen)
        self._counts[chosen] += 1
        self._due_at[chosen], self._late_at[chosen] = self._due(chosen), self._late(chosen)

    def _due(self, number: int) -> int:
        """At how many places one more for the environment is not too early."""
        due = (self._counts[number] * self._unit + self._slack) * self._sum
        return -(-due // (self._unit * self._weights[number]))

    def _late(self, number: int) -> int:
        """When one more is late, in whole numbers that compare as those places do."""
        due = (self._counts[number] + 1) * self._unit - self._slack
        return due * (self._multiple // self._weights[number])
