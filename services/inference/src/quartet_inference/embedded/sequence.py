"""A completion in the batch of the embedded engine.

1. `tokens` is prompt plus completion; the KV row of a running sequence holds all of them but the last.
2. Where experts are noted, they are of the tokens from the first on, each noted once: what is computed anew
   keeps the experts that took it first, because what was drawn came from these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quartet_inference.completion import Completion
from quartet_inference.embedded.lora import Slot
from quartet_inference.engine import Experts, Finish, Routed, Top


@dataclass(eq=False)
class RunningSequence(Completion):
    """One of a request's completions."""

    ticket: Any  # the request that it belongs to, for whoever delivers its events
    tokens: list[int] = field(default_factory=list, init=False)
    slot: Slot | None  # of its run's adapter; None: the base model answers
    device: torch.device  # of the model
    row: int | None = field(default=None, init=False)  # of the KV cache, while it is in the batch
    # The weights that all of its keys and values come from: the base's epoch and the adapter's serial.
    kv_of: tuple[int, int] | None = field(default=None, init=False)
    noted: int = field(default=0, init=False)  # tokens whose experts are noted
    _experts: list[Experts] = field(default_factory=list, init=False)
    _counts: Tensor | None = field(default=None, init=False)
    _seen: Tensor | None = field(default=None, init=False)

    @property
    def owner(self) -> int:
        """Serial of the adapter that computes it."""
        return 0 if self.slot is None else self.slot.serial

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokens = list(self.request.prompt)

    def accept(self, token: int, logprob: float, version: int, top: Top | None = None) -> Finish | None:
        """Append a sampled token, with its alternatives where they are asked for; the end, if it is one."""
        self.tokens.append(token)
        if self._counts is not None:
            self._counts[token] += 1
        return super().accept(token, logprob, version, top)

    def note(self, experts: Experts, first: int = 0) -> None:
        """Note which experts took the tokens from position `first` on."""
        fresh = experts[self.noted - first :]
        if len(fresh):
            self._experts.append(fresh)
            self.noted += len(fresh)

    def experts(self, count: int) -> Experts | None:
        """Of so many tokens, if they are noted."""
        return np.concatenate(self._experts)[:count] if 0 < count <= self.noted else None

    def routed(self) -> Routed | None:
        """What the request asked for of them; None where it did not."""
        start = self.request.experts_from
        told = None if start is None else self.experts(len(self.tokens) - 1)
        return None if start is None or told is None else Routed(self.index, start, told[start:])

    def token_counts(self, vocabulary: int) -> Tensor:
        """How often each token was sampled so far."""
        if self._counts is None:
            sampled = torch.tensor(self.out, dtype=torch.long, device=self.device)
            self._counts = torch.bincount(sampled, minlength=vocabulary).float()
        return self._counts

    def prompt_tokens_seen(self, vocabulary: int) -> Tensor:
        """Which tokens the prompt contains."""
        if self._seen is None:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=self.device)
            self._seen[torch.tensor(self.request.prompt, device=self.device)] = True
        return self._seen
