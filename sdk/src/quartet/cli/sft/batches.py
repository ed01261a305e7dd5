"""Which samples each step learns.

1. Every sample comes once in each pass, in an order of its own that follows from the seed alone; the last
   batch of a pass goes on with the next one.
2. A batch has `size` samples; or, where tokens are counted, as many of the next ones as have so many tokens
   together at most, and one at least.
3. A sample is drawn by its number and its length: what a fine-tuning that goes on has behind it is not read.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from quartet.cli.sft.shelf import Shelf
from quartet.run.sft import SftConfig


@dataclass(frozen=True)
class Batching:
    """How much a batch is."""

    size: int
    #: In place of the number of samples; 0: it is that.
    tokens: int = 0

    @classmethod
    def of(cls, config: SftConfig) -> Batching:
        """What a fine-tuning says."""
        return cls(config.batch_size, config.batch_tokens)

    def cut(self, numbers: Iterable[int], lengths: Sequence[int]) -> Iterator[list[int]]:
        """The batches of samples that come in this order."""
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

    def drawn(self, samples: Shelf, seed: int) -> Iterator[list[int]]:
        """The numbers of each step's samples, for ever."""
        return self.cut(_order(len(samples), seed), samples.lengths)


def steps_of(config: SftConfig, samples: Shelf) -> int:
    """Optimizer steps of a fine-tuning on these. Raises ConfigError."""
    batching = Batching.of(config)

    def in_batches(chats: int) -> int:
        order = islice(_order(len(samples), config.seed), chats)
        return sum(1 for _ in batching.cut(order, samples.lengths))

    return config.steps(len(samples), in_batches if batching.tokens else None)


def _order(count: int, seed: int) -> Iterator[int]:
    epoch = 0
    while True:
        numbers = array("Q", range(count))
        random.Random(f"{seed}/{epoch}").shuffle(numbers)
        while numbers:
            yield numbers.pop()
        epoch += 1
