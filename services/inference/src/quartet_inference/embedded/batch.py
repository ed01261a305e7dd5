"""The running batch: rows join and leave between decode steps.

1. Row i of the KV cache belongs to `rows[i]`, which knows it (`row`); there are no holes. A row leaves in a
   time that does not grow with the batch.
2. Equal prompts of one adapter that join together are computed once; later ones and longer ones take what
   the prefix cache has.
3. Where the KV budget does not hold all rows at their next length, the last row leaves and is handed back
   (that which joined last, unless it took the place of one that left): it loses its keys and values, never a
   token.
4. `step` samples one token for every row. Weights do not change inside any method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quartet_inference.embedded.experts import NotingForward
from quartet_inference.embedded.forward import Forward
from quartet_inference.embedded.kv_cache import KvCache
from quartet_inference.embedded.lora import Bank, Slot
from quartet_inference.embedded.prefill import PREFILL_TOKENS, prefill
from quartet_inference.embedded.prefix_cache import Key, Prefix, PrefixCache
from quartet_inference.embedded.sequence import RunningSequence
from quartet_inference.engine import Experts, Top
from quartet_inference.sampler import Sampler

#: Steps that must fit before a row may join, so that it does not join and leave again all the time.
JOIN_SLACK = 64


class Drawn(NamedTuple):
    """One sampled token; a log-probability that is no number means that the weights are broken."""

    row: RunningSequence
    token: int
    logprob: float
    top: Top | None = None  # its alternatives, where the row asks for them

    @property
    def sound(self) -> bool:
        """Whether it came from a distribution."""
        return math.isfinite(self.logprob)

    @property
    def stuck(self) -> bool:
        """Whether the row's structure allowed no token."""
        return self.logprob == math.inf


class Batch:
    """The rows that decode together."""

    def __init__(self, forward: Forward, cache: KvCache, prefixes: PrefixCache, bank: Bank) -> None:
        self._forward = forward
        self._noting = forward if isinstance(forward, NotingForward) else None
        self._bank = bank
        self._cache = cache
        self._prefixes = prefixes
        self._epoch = 0
        self.device = cache.shape.device
        self._ids = torch.zeros(cache.max_rows, dtype=torch.long, device=self.device)
        self._positions = torch.zeros_like(self._ids)  # of the token in _ids
        self._sampler: Sampler | None = None
        self.rows: list[RunningSequence] = []

    def room_for(self, waiting: Iterable[RunningSequence]) -> int:
        """How many of these, in order, can join now."""
        longest = max((len(row.tokens) for row in self.rows), default=0)
        count, new_tokens = 0, 0
        for sequence in waiting:
            longest = max(longest, len(sequence.tokens))
            length = min(longest + JOIN_SLACK, self._cache.max_length)
            new_tokens += len(sequence.tokens)
            if not self._cache.fits(len(self.rows) + count + 1, length):
                break
            if count and new_tokens > PREFILL_TOKENS:  # the others have waited for one pass, not for all
                break
            count += 1
        return count

    def join(self, joiners: Sequence[RunningSequence]) -> list[Drawn]:
        """Compute the prompts of new rows and sample the first token of each."""
        groups: dict[Key, list[RunningSequence]] = {}
        for sequence in joiners:
            groups.setdefault((sequence.owner, tuple(sequence.tokens)), []).append(sequence)
        prompts = sorted(groups, key=lambda key: len(key[1]))
        longest = max(len(row.tokens) for row in [*self.rows, *joiners])
        self._cache.reserve(len(self.rows) + len(joiners), min(longest + 1, self._cache.max_length))
        first = len(self.rows)
        leaders_end = first + len(prompts)
        logits, experts = self._compute(first, prompts, groups)
        followers: list[RunningSequence] = []
        order = list(range(len(prompts)))
        for number, prompt in enumerate(prompts):
            others = groups[prompt][1:]
            if others:
                at = leaders_end + len(followers)
                self._cache.copy_row(first + number, list(range(at, at + len(others))), len(prompt[1]))
                followers.extend(others)
                order.extend([number] * len(others))
                for other in others:
                    if other.cached_tokens is None:
                        other.cached_tokens = len(prompt[1])
        new = [groups[prompt][0] for prompt in prompts] + followers
        for row, sequence in enumerate(new, first):
            sequence.row, sequence.kv_of = row, (self._epoch, sequence.owner)
        if self._noting is not None:
            for prompt, told in zip(prompts, experts, strict=True):
                for sequence in groups[prompt]:
                    sequence.noted.joined(told)
        self.rows.extend(new)
        self._bank.set_rows(first, [sequence.slot for sequence in new])
        self._sampler = None
        drawn = self._draw(new, Sampler(new, self.device), logits[order])
        self._ids[first : len(self.rows)] = torch.tensor([item.token for item in drawn])
        self._positions[first : len(self.rows)] = torch.tensor([len(sequence.tokens) for sequence in new])
        return drawn

    def _compute(
        self, first: int, prompts: list[Key], groups: dict[Key, list[RunningSequence]]
    ) -> tuple[Tensor, list[Experts]]:
        """Fill the leaders' rows; the logits after each prompt, and its experts where they are noted."""
        found = [self._prefixes.find(tokens, owner) for owner, tokens in prompts]
        # Prompts that are known whole go first, so that those to be computed are neighbours.
        known = [i for i, (_, tokens) in enumerate(prompts) if found[i][1] == len(tokens)]
        order = known + [i for i in range(len(prompts)) if i not in set(known)]
        prompts[:] = [prompts[i] for i in order]
        found = [found[i] for i in order]
        for number, (prefix, shared) in enumerate(found):
            if prefix is not None:
                self._cache.write_row(first + number, prefix.kv, shared)
            leader = groups[prompts[number]][0]
            leader.cached_tokens = shared if leader.cached_tokens is None else leader.cached_tokens
        known_logits = [
            prefix.logits for prefix, _ in found[: len(known)] if prefix and prefix.logits is not None
        ]
        known_experts = [_of(prefix) for prefix, _ in found[: len(known)]] if self._noting else []
        if len(known) == len(prompts):
            return torch.stack(known_logits), known_experts
        self._bank.set_rows(first, [groups[prompt][0].slot for prompt in prompts])
        starts = [shared for _, shared in found[len(known) :]]
        sequences = [tokens for _, tokens in prompts[len(known) :]]
        if self._noting is not None:
            self._noting.begin()
        computed = prefill(self._forward, first + len(known), sequences, starts)
        experts = self._noted(first + len(known), sequences, found[len(known) :])
        for number in range(len(known), len(prompts)):
            after = computed[number - len(known)]
            if torch.isfinite(after).all():
                owner, tokens = prompts[number]
                kv = self._cache.read_row(first + number, len(tokens))
                told = experts[number - len(known)] if experts else None
                self._prefixes.add(Prefix(tokens, kv, after.clone(), owner, told))
        logits = torch.cat([torch.stack(known_logits), computed]) if known_logits else computed
        return logits, known_experts + experts

    def _noted(
        self, first: int, sequences: Sequence[tuple[int, ...]], found: Sequence[tuple[Prefix | None, int]]
    ) -> list[Experts]:
        """The experts of whole prompts that were computed behind what was found of them."""
        if self._noting is None:
            return []
        spans = [
            (row, shared, len(tokens))
            for row, (tokens, (_, shared)) in enumerate(zip(sequences, found, strict=True), first)
        ]
        told = self._noting.take(spans)
        for number, (prefix, shared) in enumerate(found):
            if shared:
                told[number] = np.concatenate([_of(prefix)[:shared], told[number]])
        return told

    def make_room(self) -> list[RunningSequence]:
        """Rows that must leave so that the rest can take a step."""
        leaving = []
        while not self._cache.fits(len(self.rows), max(len(row.tokens) for row in self.rows)):
            leaving.append(self.rows[-1])
            self.remove(self.rows[-1])
        return leaving

    def step(self) -> list[Drawn]:
        """One token for every row. The caller has made room."""
        count = len(self.rows)
        context = max(len(row.tokens) for row in self.rows)
        self._cache.reserve(count, context)
        if self._noting is not None:
            self._noting.begin()
        logits = self._forward(0, self._ids[:count, None], self._positions[:count, None], context, None)
        if self._noting is not None:
            # A row's last token is the one that was computed on.
            spans = [(number, len(row.tokens) - 1, len(row.tokens)) for number, row in enumerate(self.rows)]
            for row, told in zip(self.rows, self._noting.take(spans), strict=True):
                row.noted.stepped(told)
        if self._sampler is None:
            self._sampler = Sampler(list(self.rows), self.device)
        return self._draw(self.rows, self._sampler, logits, to_rows=True)

    def _draw(
        self, rows: Sequence[RunningSequence], sampler: Sampler, logits: Tensor, to_rows: bool = False
    ) -> list[Drawn]:
        tokens, logprobs, tops = sampler.draw(logits)
        if to_rows:
            self._ids[: len(rows)] = tokens
            self._positions[: len(rows)] += 1
        drawn = [
            Drawn(*item) for item in zip(rows, tokens.cpu().tolist(), logprobs.cpu().tolist(), strict=True)
        ]
        for index, top in tops.items():
            drawn[index] = drawn[index]._replace(top=top)
        return drawn

    def remove(self, sequence: RunningSequence, keep_prefix: bool = False) -> None:
        """Take a row out; its place goes to the last row."""
        hole, last = sequence.row, len(self.rows) - 1
        assert hole is not None, "it is in the batch"
        held = len(sequence.tokens) - 1
        if keep_prefix and sequence.kv_of == (self._epoch, sequence.owner):
            tokens = tuple(sequence.tokens[:held])
            kv, experts = self._cache.read_row(hole, held), sequence.noted.present(held)
            self._prefixes.add(Prefix(tokens, kv, None, sequence.owner, experts))
        self._cache.fill_hole(hole, last, len(self.rows[last].tokens))
        self._ids[hole], self._positions[hole] = self._ids[last], self._positions[last]
        self.rows[hole] = self.rows[last]
        self.rows[hole].row = hole
        self.rows.pop()
        sequence.row = None
        self._bank.fill_hole(hole, last)
        self._sampler = None

    def clean(self, broken: Sequence[RunningSequence]) -> None:
        """Wipe rows with non-finite keys before they leave: masking multiplies by zero, which keeps a NaN."""
        for sequence in broken:
            assert sequence.row is not None, "it is in the batch"
            self._cache.clean_row(sequence.row)

    def weights_changed(self, apply: Callable[[], None], recompute: bool) -> list[RunningSequence]:
        """Change the weights of the base model by `apply`: no prefix is known any more.

        Where keys shall be recomputed, all rows leave: they join again as prompts do. Returned in order.
        """
        self._epoch += 1
        self._prefixes.clear()
        apply()
        return self._leave(self.rows) if recompute else []

    def adapter_changed(self, slot: Slot, before: int, recompute: bool) -> list[RunningSequence]:
        """The slot, whose serial was `before`, has other matrices; the same for its rows."""
        self._prefixes.forget(before)
        return self._leave([row for row in self.rows if row.slot is slot]) if recompute else []

    def adapter_gone(self, serial: int) -> None:
        """No row has this adapter any more, and none will."""
        self._prefixes.forget(serial)

    def _leave(self, rows: Sequence[RunningSequence]) -> list[RunningSequence]:
        leaving = list(rows)
        for row in reversed(leaving):
            self.remove(row)
        return leaving


def _of(prefix: Prefix | None) -> Experts:
    """The experts of a prefix, where they are noted."""
    assert prefix is not None and prefix.experts is not None, "every prefix has them"
    return prefix.experts
