"""What the rows of a batch may not sample in the next step.

1. A row is restricted by its structure, or by `min_tokens`, or not at all: a request that asks for both is
   refused before.
2. By `min_tokens` a row may sample nothing that would end it, while it has sampled fewer. From then on it is
   restricted no more: `outdated` says that there is such a row, and the list is to be made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quartet_inference.engine import Sampling
from quartet_inference.structure.masks import Following, Masks


class Restrictable(Following, Protocol):
    """A row that a structure or `min_tokens` may restrict."""

    @property
    def sampling(self) -> Sampling:
        """Its parameters."""
        ...

    @property
    def sampled(self) -> int:
        """How many tokens were sampled so far."""
        ...

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that would end it."""
        ...


class Restriction:
    """That of a fixed list of rows, as far as it does not change with the steps."""

    def __init__(self, rows: Sequence[Restrictable], device: torch.device | None) -> None:
        self._device = device
        following = [i for i, row in enumerate(rows) if row.follower is not None]
        early = [i for i, row in enumerate(rows) if row.sampled < row.sampling.min_tokens]
        #: Those that are restricted now.
        self.rows = sorted(following + early)
        self._following = following
        mixed = sorted(range(len(self.rows)), key=(following + early).__getitem__)
        self._order = torch.tensor(mixed, device=device) if following and early else None
        self._masks = Masks([rows[i] for i in following], device) if following else None
        self._early = [rows[i] for i in early]
        self._ends: Tensor | None = None  # of the early ones, once the vocabulary is known

    @property
    def outdated(self) -> bool:
        """Whether a row that was early has as many tokens now as it needs."""
        return any(row.sampled >= row.sampling.min_tokens for row in self._early)

    def forbidden(self, vocabulary: int) -> tuple[Tensor, list[int]]:
        """Whether each of `rows` may not sample each token, and those whose structure allows nothing."""
        parts, stuck = [], []
        if self._masks is not None:
            followed, places = self._masks.forbidden(vocabulary)
            parts.append(followed)
            stuck = [self._following[place] for place in places]
        if self._early:
            if self._ends is None:  # once: a device would wait for it in every step
                self._ends = self._held_back(vocabulary)
            parts.append(self._ends)
        # What stays with it is read and never written to.
        return parts[0] if self._order is None else torch.cat(parts)[self._order], stuck

    def _held_back(self, vocabulary: int) -> Tensor:
        pairs = [(at, token) for at, row in enumerate(self._early) for token in sorted(row.ends)]
        rows, tokens = torch.tensor(pairs, dtype=torch.long, device=self._device).reshape(-1, 2).unbind(1)
        ends = torch.zeros(len(self._early), vocabulary, dtype=torch.bool, device=self._device)
        ends[rows, tokens] = True
        return ends
