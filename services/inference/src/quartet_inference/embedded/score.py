"""Log-probabilities of given tokens, computed in pieces between decode steps.

1. One call of `piece` computes at most PIECE_TOKENS tokens: a decode step waits for no more.
2. Short sequences share a pass; a longer one goes through its own key-value cache, piece by piece.
3. A sequence is scored by one version of the base model or of one adapter: when these weights change, what
   was begun starts anew, and what is pinned to others fails.
4. At most `max_waiting` sequences wait; more are refused with OVERLOADED. One that is `ahead` is not counted
   on, and is the next whose piece is computed.
5. Runs in the decoding thread, which is the only one that touches the weights.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import structlog
import torch
from quartet.errors import QuartetError
from torch import nn
from transformers import DynamicCache

from quartet_inference.embedded.device import is_lost, within_memory
from quartet_inference.embedded.hub import CACHE
from quartet_inference.embedded.lora import Bank, Slot, plan_of
from quartet_inference.engine import NonFiniteLogits, Scored, ScoreRequest, ServedWeights, refusal

#: Tokens of one pass: a decode step is delayed by about as much as by a short prompt that joins.
PIECE_TOKENS = 256
#: Logits of one pass, 64 MiB of float32: with a vocabulary of 151,000 it is this that bounds the piece.
LOGIT_ELEMENTS = 1 << 24

log = structlog.get_logger()


@dataclass(eq=False)
class ScoreJob:
    """A sequence on its way: `settle` receives its answer, once."""

    request: ScoreRequest
    settle: Callable[[Scored | QuartetError], None]
    slot: Slot | None = None  # of the adapter that scores it; None: the base model does
    done: int = 0  # tokens whose keys and values are in the cache
    cache: DynamicCache | None = None
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    covered: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.covered = [p for start, length in self.request.covered for p in range(start, start + length)]

    @property
    def needed(self) -> int:
        """Tokens to compute: those up to the last one that predicts a covered position."""
        return self.covered[-1] if self.covered else 0

    def restart(self) -> None:
        """Forget what other weights computed."""
        self.done, self.cache = 0, None
        self.logprobs.clear()
        self.tops.clear()


class Scorer:
    """The sequences that wait for their log-probabilities."""

    def __init__(self, network: nn.Module, max_waiting: int, bank: Bank) -> None:
        self._bank = bank
        self._network: Any = network
        config: Any = network.config
        vocabulary = int(config.get_text_config().vocab_size)
        self._device = next(network.parameters()).device
        self._max_waiting = max_waiting
        self._piece_tokens = max(1, min(PIECE_TOKENS, LOGIT_ELEMENTS // vocabulary))
        # In the order of asking; keys alone, because any of them may leave.
        self._jobs: OrderedDict[ScoreJob, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: ScoreJob, served: ServedWeights | None) -> None:
        """Queue a sequence, or refuse it."""
        refused = refusal(job.request, served)
        ahead = job.request.ahead
        if refused is None and not ahead and len(self._jobs) >= self._max_waiting:
            refused = QuartetError(
                "OVERLOADED", f"{len(self._jobs)} sequences wait already to be scored", retry_after_ms=500
            )
        if refused is not None:
            job.settle(refused)
        else:
            self._jobs[job] = None
            self._jobs.move_to_end(job, last=not ahead)

    def drop(self, job: ScoreJob) -> None:
        """Nobody waits for this one any more."""
        self._jobs.pop(job, None)

    def weights_change(self, weights: ServedWeights, slot: Slot | None = None) -> None:
        """Begin anew with other weights of an adapter, or of the base model."""
        for job in [job for job in self._jobs if job.slot is slot]:
            refused = refusal(job.request, weights)
            if refused is not None:
                del self._jobs[job]
                job.settle(refused)
            job.restart()

    def slot_gone(self, slot: Slot, error: QuartetError) -> None:
        """End those that wait for an adapter."""
        for job in [job for job in self._jobs if job.slot is slot]:
            del self._jobs[job]
            job.settle(error)

    def fail(self, error: QuartetError) -> None:
        """End all of them."""
        for job in self._jobs:
            job.settle(error)
        self._jobs.clear()

    def piece(self, served: ServedWeights) -> None:
        """Compute one pass for those that wait longest; `served` is the base model."""
        jobs = self._together()
        slot = jobs[0].slot
        version = (served if slot is None else slot.weights).version
        try:
            with self._bank.active(plan_of([slot] * len(jobs))):
                if len(jobs) == 1 and jobs[0].needed > self._piece_tokens:
                    within_memory(lambda: self._long(jobs[0]))
                else:
                    within_memory(lambda: self._short(jobs))
        except Exception as error:
            log.exception("scoring failed")
            if not isinstance(error, QuartetError) and is_lost(self._device):
                raise  # the decoding thread ends (decoder.py 5)
            refused = error if isinstance(error, QuartetError) else QuartetError("INTERNAL", "scoring failed")
            for job in jobs:
                del self._jobs[job]
                job.settle(refused)
            return
        for job in jobs:
            if len(job.logprobs) == len(job.covered):
                del self._jobs[job]
                job.settle(_answer(job, version))

    def _together(self) -> list[ScoreJob]:
        """The first in the queue and those behind it that fit into the same pass."""
        first = next(iter(self._jobs))
        jobs, longest = [first], first.needed
        if longest > self._piece_tokens:
            return jobs
        for job in islice(self._jobs, 1, self._piece_tokens):
            longer = max(longest, job.needed)
            if job.slot is first.slot and longer * (len(jobs) + 1) <= self._piece_tokens:
                jobs.append(job)
                longest = longer
        return jobs

    def _short(self, jobs: list[ScoreJob]) -> None:
        """Whole sequences, side by side: what pads a row comes behind it and is seen by no token of it."""
        longest = max(job.needed for job in jobs)
        if longest == 0:  # nothing is covered
            return
        ids = torch.zeros(len(jobs), longest, dtype=torch.long)
        for row, job in enumerate(jobs):
            ids[row, : job.needed] = torch.tensor(job.request.tokens[: job.needed])
        logits = self._network(input_ids=ids.to(self._device), use_cache=False).logits
        for row, job in enumerate(jobs):
            self._read(logits[row], job, job.covered, 0)

    def _long(self, job: ScoreJob) -> None:
        """The next piece of one sequence."""
        if job.cache is None:
            # Whole, whatever the configuration says of windows: no sequence is longer than one (probe.py 2),
            # and Moshi, for one, looks through none.
            job.cache = DynamicCache()
        start, end = job.done, min(job.needed, job.done + self._piece_tokens)
        ids = torch.tensor([job.request.tokens[start:end]], device=self._device)
        positions = torch.arange(start, end, device=self._device)[None]
        logits = self._network(
            input_ids=ids, position_ids=positions, use_cache=True, **{CACHE: job.cache}
        ).logits
        begun = len(job.logprobs)
        here = [position for position in job.covered[begun : begun + end - start] if position <= end]
        self._read(logits[0], job, here, start)
        job.done = end

    def _read(self, logits_TV: torch.Tensor, job: ScoreJob, covered: list[int], start: int) -> None:
        """Note those of covered positions; row i of the logits predicts position start + i + 1."""
        if not covered:
            return
        rows = torch.tensor(covered, device=self._device) - start - 1
        targets = torch.tensor([job.request.tokens[position] for position in covered], device=self._device)
        chosen = logits_TV[rows].float()
        picked = chosen.gather(1, targets[:, None])[:, 0]
        mass = chosen.logsumexp(-1)
        job.logprobs.extend((picked - mass).cpu().tolist())
        if job.request.top:
            best = chosen.topk(min(job.request.top, chosen.shape[-1]), -1)
            values = (best.values - mass[:, None]).cpu().tolist()
            pairs = zip(best.indices.cpu().tolist(), values, strict=True)
            job.tops.extend(dict(zip(*row, strict=True)) for row in pairs)


def _answer(job: ScoreJob, version: int) -> Scored | QuartetError:
    if all(map(math.isfinite, job.logprobs)):
        return Scored(job.logprobs, version, job.tops)
    return NonFiniteLogits()
