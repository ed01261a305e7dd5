"""Which samples each step learns: samples by themselves, or rows of them (best_fit.py).

1. Every sample or row comes once in each pass, in an order of its own that follows from the seed alone; the
   last batch of a pass goes on with the next one, or is short.
2. A batch has `size` of them; or, where tokens are counted, as many of the next ones as have so many tokens
   together at most, and one at least.
3. They are drawn by their numbers and lengths: what a fine-tuning that goes on has behind it is not read.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Protocol

from quartet.cli.sft.best_fit import Rows
from quartet.cli.sft.shelf import Shelf
from quartet.run.sft import SftConfig, as_written
from quartet.v1.rollout_pb2 import Sample


class Drawable(Protocol):
    """What batches are of: samples, or rows of them."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each."""

    def taken(self, numbers: Iterable[int]) -> list[Sample]:
        """The samples of these."""


def drawable(config: SftConfig, samples: Shelf) -> Drawable:
    """What of these samples the batches of a fine-tuning are of."""
    return Rows(samples, config.max_tokens) if config.packing == "best_fit" else samples


@dataclass(frozen=True)
class Batching:
    """How much a batch is."""

    size: int
    #: In place of the number of samples; 0: it is that.
    tokens: int = 0
    #: Whether the last of each pass has what is left of it.
    short: bool = False

    @classmethod
    def of(cls, config: SftConfig) -> Batching:
        """What a fine-tuning says."""
        return cls(config.batch_size, config.batch_tokens, config.short_batches)

    @classmethod
    def of_samples(cls, config: SftConfig) -> Batching:
        """As much of samples that stand by themselves, also where batches are of rows."""
        if config.packing == "best_fit" and not config.batch_tokens:
            return cls(config.batch_size, config.batch_size * config.max_tokens)
        return cls.of(config)

    def cut(self, numbers: Iterable[int], lengths: Sequence[int]) -> Iterator[list[int]]:
        """The batches of what comes in this order."""
        batch: list[int] = []
        tokens = 0
        for number in numbers:
            more = lengths[number]
            is_full = tokens + more > self.tokens if self.tokens else len(batch) == self.size
            if batch and is_full:
                yield batch
                batch, tokens = [], 0
            batch.append(number)
            tokens += more
        if batch:
            yield batch

    def drawn(self, given: Drawable, seed: int) -> Iterator[list[int]]:
        """The numbers of what each step has, for ever."""
        passes: Iterable[Iterable[int]] = _passes(len(given), seed)
        if not self.short:
            passes = (chain.from_iterable(passes),)
        return chain.from_iterable(self.cut(numbers, given.lengths) for numbers in passes)


def steps_of(config: SftConfig, given: Drawable) -> int:
    """Optimizer steps of a fine-tuning on these. Raises ConfigError."""
    batching = Batching.of(config)

    def in_batches(many: int) -> int:
        drawn = _drawn_after(config, given)
        return next(step for step, count in enumerate(drawn, start=1) if count >= many)

    return config.steps(len(given), in_batches if batching.tokens or batching.short else None)


def ends_of_passes(config: SftConfig, given: Drawable, steps: int, epochs: float | None) -> list[int]:
    """After which of so many steps, but for the last, so many more passes are done; none where that is not
    said."""
    if epochs is None or not len(given):
        return []
    every = as_written(epochs) * len(given)
    ends, due = list[int](), math.ceil(every)
    for step, count in enumerate(islice(_drawn_after(config, given), steps - 1), start=1):
        if count >= due:
            ends.append(step)
            due = math.ceil((count // every + 1) * every)
    return ends


def _drawn_after(config: SftConfig, given: Drawable) -> Iterator[int]:
    """How many are drawn after each step."""
    return accumulate(len(batch) for batch in Batching.of(config).drawn(given, config.seed))


def _passes(count: int, seed: int) -> Iterator[Iterator[int]]:
    """The order of each."""
    epoch = 0
    while True:
        numbers = array("Q", range(count))
        random.Random(f"{seed}/{epoch}").shuffle(numbers)
        yield reversed(numbers)
        epoch += 1
