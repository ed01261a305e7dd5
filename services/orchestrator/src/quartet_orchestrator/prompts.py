"""Prompts: which environment and which task a group gets.

1. The answer is a function of the seed, the environments and the group's number alone: nothing to save,
   nothing to lose.
2. Environments are mixed in cycles of CYCLE groups; each has its share of every cycle, by weight, in a seeded
   random order.
3. Within an environment every task comes once per epoch, in an order shuffled anew each epoch. An infinite
   one is read in order.

Pure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from quartet.run.config import MAX_ENVIRONMENTS

# Weights are honoured to one part in this many, and an environment never waits longer than two cycles for its
# turn; so a cycle has room for every environment that a run may have.
CYCLE = MAX_ENVIRONMENTS


@dataclass(frozen=True)
class Source:
    """An environment to draw from. `size` is the number of its training tasks; None where they never end."""

    id: str
    weight: float
    size: int | None


@dataclass(frozen=True)
class Choice:
    environment: int
    task_index: int


class Prompts:
    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        assert sources and all(s.weight > 0 and (s.size is None or s.size > 0) for s in sources)
        self._sources = tuple(sources)
        self._seed = seed
        self._shares = shares([s.weight for s in sources])

    def choose(self, group: int) -> Choice:
        cycle, position = divmod(group, CYCLE)
        order = _order(self._seed, self._shares, cycle)
        environment = order[position]
        earlier = order[:position].count(environment)
        turn = cycle * self._shares[environment] + earlier
        return Choice(environment, self._task(environment, turn))

    def _task(self, environment: int, turn: int) -> int:
        source = self._sources[environment]
        if source.size is None:
            return turn
        epoch, position = divmod(turn, source.size)
        # The index keeps two entries of one environment from walking in step.
        return _epoch(f"{self._seed}/{environment}/{source.id}/{epoch}", source.size)[position]


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Splits a cycle by weight (largest remainders); nobody gets nothing."""
    assert 0 < len(weights) <= CYCLE, f"at most {CYCLE} environments"
    total = sum(weights)
    exact = [weight / total * CYCLE for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) < CYCLE:
        neediest = max(range(len(counts)), key=lambda i: exact[i] - counts[i])
        counts[neediest] += 1
    while sum(counts) > CYCLE:
        richest = max((i for i in range(len(counts)) if counts[i] > 1), key=lambda i: counts[i] - exact[i])
        counts[richest] -= 1
    return tuple(counts)


@lru_cache(maxsize=4)
def _order(seed: int, counts: tuple[int, ...], cycle: int) -> tuple[int, ...]:
    order = [environment for environment, count in enumerate(counts) for _ in range(count)]
    random.Random(f"mix/{seed}/{cycle}").shuffle(order)
    return tuple(order)


@lru_cache(maxsize=8)
def _epoch(key: str, size: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"epoch/{key}").shuffle(order)
    return tuple(order)
