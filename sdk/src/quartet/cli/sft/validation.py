"""The validation set: chats that are never learned, and what the model makes of them.

1. The loss is minus the mean log-probability of all covered tokens of the set, each counted once: what one
   batch of the whole set would have as its loss. The perplexity is its exponential. The accuracy is the share
   of these tokens that are the most likely ones where they stand.
2. Measuring changes nothing. The trainer's Forward has no place in the run's sequence, draws nothing and
   drops nothing out: a fine-tuning comes to the same bits with a validation set and without.
3. No more is sent at once than a batch of training: what is learned at once fits, and scoring it takes less.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from quartet.cli.sft.batches import Batching
from quartet.cli.sft.requests import scoring_frames
from quartet.cli.sft.shelf import Shelf
from quartet.kit.call import stream
from quartet.run.sft import MeasureConfig
from quartet.v1.rollout_pb2 import Sample


@dataclass(frozen=True)
class Measured:
    """What the model makes of the set."""

    loss: float
    #: Share of the tokens than which none is more likely.
    accuracy: float
    #: That both are means over.
    tokens: int

    @property
    def perplexity(self) -> float:
        """Of a token."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Validation:
    """The set, and when it is measured; without samples never."""

    samples: Shelf
    when: MeasureConfig
    #: Of the whole fine-tuning.
    steps: int
    #: What is sent at once.
    batching: Batching
    #: After which steps it is measured because passes are done (eval.epochs).
    passes: Sequence[int] = ()

    def is_due(self, done: int) -> bool:
        """Whether to measure once so many steps are done."""
        if not self.samples:
            return False
        if done == 0:
            return self.when.before
        if done == self.steps:
            return self.when.after
        return done in self.passes or (self.when.interval > 0 and done % self.when.interval == 0)

    @property
    def is_ever_due(self) -> bool:
        """Whether it is measured at all."""
        moments = (0, self.when.interval, self.steps, *self.passes)
        return any(self.is_due(done) for done in moments if done <= self.steps)

    def parts(self) -> Iterator[Sequence[Sample]]:
        """The set, as much of it as is sent at once."""
        numbers = range(len(self.samples))
        for part in self.batching.cut(numbers, self.samples.lengths):
            yield self.samples.taken(part)

    async def measured(self, stub: Any, timeout_s: float) -> Measured:
        """What the weights as they are make of it; no part takes longer. Raises QuartetError."""
        total, best, tokens = 0.0, 0, 0
        for part in self.parts():
            call = stub.Forward(scoring_frames(part), timeout=timeout_s)
            async for answer in stream(call, idle_timeout_s=timeout_s, sends=True):
                total -= math.fsum(answer.logprobs)
                best += sum(answer.best)
                tokens += len(answer.logprobs)
        return Measured(total / tokens, best / tokens, tokens)


def repeated(samples: Sequence[Sample], learned: Sequence[Sample]) -> int:
    """How many samples are among those that are learned, token for token."""
    known = Counter(map(_digest, samples))  # the smaller of the two, as a rule
    found = {digest for one in learned if (digest := _digest(one)) in known}
    return sum(known[digest] for digest in found)


def _digest(sample: Sample) -> bytes:
    return xxhash.xxh3_128_digest(sample.SerializeToString(deterministic=True))
