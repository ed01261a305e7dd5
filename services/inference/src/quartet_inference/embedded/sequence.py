"""A completion in the batch of the embedded engine.

1. `tokens` is prompt plus completion; the KV row of a running sequence holds all of them but the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quartet_inference.completion import Completion
from quartet_inference.embedded.lora import Slot
from quartet_inference.embedded.noted import Noted
from quartet_inference.engine import Finish, Routed, Stamp, Top


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
    noted: Noted = field(default_factory=Noted, init=False)
    _counts: Tensor | None = field(default=None, init=False)
    _seen: Tensor | None = field(default=None, init=False)

    @property
    def owner(self) -> int:
        """Serial of the adapter that computes it."""
        return 0 if self.slot is None else self.slot.serial

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokens = list(self.request.prompt)

    def accept(self, token: int, logprob: float, stamp: Stamp, top: Top | None = None) -> Finish | None:
        """Append a sampled token, with its alternatives where they are asked for; the end, if it is one."""
        self.tokens.append(token)
        if self._counts is not None:
            self._counts[token] += 1
        return super().accept(token, logprob, stamp, top)

    def routed(self) -> Routed | None:
        """What the request asked for of its experts; None where it did not."""
        start = self.request.experts_from
        told = None if start is None else self.noted.first(start)
        return None if start is None or told is None else Routed(self.index, start, told)

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
