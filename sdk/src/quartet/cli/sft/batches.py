"""Which samples each step learns.

1. Every sample comes once in each pass, in an order of its own that follows from the seed alone; the last
   batch of a pass goes on with the next one, or is short.
2. A batch has `size` samples; or, where tokens are counted, as many of the next ones as have so many tokens
   together at most, and one at least.
3. A sample is drawn by its number and its length: what a fine-tuning that goes on has behind it is not read.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

from quartet.cli.sft.shelf import Shelf
from quartet.run.sft import SftConfig, as_written


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
        passes: Iterable[Iterable[int]] = _passes(len(samples), seed)
        if not self.short:
            passes = (chain.from_iterable(passes),)
        return chain.from_iterable(self.cut(numbers, samples.lengths) for numbers in passes)


def steps_of(config: SftConfig, samples: Shelf) -> int:
    """Optimizer steps of a fine-tuning on these. Raises ConfigError."""
    batching = Batching.of(config)

    def in_batches(chats: int) -> int:
        drawn = _drawn_after(config, samples)
        return next(step for step, count in enumerate(drawn, start=1) if count >= chats)

    return config.steps(len(samples), in_batches if batching.tokens or batching.short else None)


def ends_of_passes(config: SftConfig, samples: Shelf, steps: int, epochs: float | None) -> list[int]:
    """After which of so many steps, but for the last, so many more passes are done; none where that is not
    said."""
    if epochs is None or not samples:
        return []
    every = as_written(epochs) * len(samples)
    ends, due = list[int](), math.ceil(every)
    for step, count in enumerate(islice(_drawn_after(config, samples), steps - 1), start=1):
        if count >= due:
            ends.append(step)
            due = math.ceil((count // every + 1) * every)
    return ends


def _drawn_after(config: SftConfig, samples: Shelf) -> Iterator[int]:
    """How many samples are drawn after each step."""
    return accumulate(len(batch) for batch in Batching.of(config).drawn(samples, config.seed))


def _passes(count: int, seed: int) -> Iterator[Iterator[int]]:
    """The order of each."""
    epoch = 0
    while True:
        numbers = array("Q", range(count))
        random.Random(f"{seed}/{epoch}").shuffle(numbers)
        yield reversed(numbers)
        epoch += 1
