"""One completion on its way: its tokens, what ends it, and what has been told of it.

1. `tokens` is prompt plus completion; the KV row of a running sequence holds all of them but the last.
2. A sequence ends at an end token, a stop token or a stop string (all included in its tokens) or at
   `max_tokens`.
3. Tokens leave in pieces of FLUSH_TOKENS, and at the end; each is told exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quartet_inference.engine import Delta, Finish, Reason, Request, Sampling, Span

#: Tokens per message: small enough to follow a completion, large enough that messages cost little.
FLUSH_TOKENS = 32

Detokenize = Callable[[Sequence[int]], str]


class StopWatch:
    """Looks for stop strings in the text of a growing completion."""

    def __init__(self, stops: Sequence[str], detokenize: Detokenize) -> None:
        self._stops = stops
        self._detokenize = detokenize
        self._reach = max(len(stop) for stop in stops) - 1
        self._tokens: list[int] = []  # from the last place where the text was whole
        self._told = ""  # text of those that were looked at before
        self._tail = ""

    def feed(self, token: int) -> str | None:
        """The stop string that the text contains now, the earliest if there are several."""
        self._tokens.append(token)
        text = self._detokenize(self._tokens)
        if text.endswith("\ufffd"):  # a character is still incomplete
            return None
        window = self._tail + text[len(self._told) :]
        found = [(window.find(stop), stop) for stop in self._stops if stop in window]
        if found:
            return min(found)[1]
        self._tail = window[-self._reach :] if self._reach else ""
        # The last token stays: some decoders treat the first token of a text in a special way.
        self._tokens = self._tokens[-1:]
        self._told = self._detokenize(self._tokens)
        return None


@dataclass(eq=False)
class RunningSequence:
    """One of a request's completions."""

    request: Request
    index: int
    seed: int
    end_tokens: frozenset[int]
    watch: StopWatch | None
    ticket: Any  # the request that it belongs to, for whoever delivers its events
    tokens: list[int] = field(default_factory=list)
    out: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int | None = None
    kv_epoch: int = -1  # the weights that all of its keys and values come from
    _told: int = 0
    _marks: list[tuple[int, int]] = field(default_factory=list)
    _counts: Tensor | None = None
    _seen: Tensor | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def sampling(self) -> Sampling:
        """How it is sampled."""
        return self.request.sampling

    def accept(self, token: int, logprob: float, version: int) -> Finish | None:
        """Append a sampled token; the end, if it is one."""
        if not self._marks or self._marks[-1][1] != version:
            self._marks.append((len(self.out), version))
        self.tokens.append(token)
        self.out.append(token)
        self.logprobs.append(logprob)
        if self._counts is not None:
            self._counts[token] += 1
        if token in self.end_tokens and not self.sampling.ignore_eos:
            return self._finish(Reason.STOP)
        if token in self.sampling.stop_token_ids:
            return self._finish(Reason.STOP, token=token)
        match = self.watch.feed(token) if self.watch is not None else None
        if match is not None:
            return self._finish(Reason.STOP, match)
        return self._finish(Reason.LENGTH) if len(self.out) >= self.sampling.max_tokens else None

    def _finish(self, reason: Reason, match: str = "", token: int | None = None) -> Finish:
        return Finish(self.index, reason, match, token, self.cached_tokens or 0)

    @property
    def untold(self) -> int:
        """Tokens not yet delivered."""
        return len(self.out) - self._told

    def tell(self) -> Delta:
        """Deliver what has not been delivered."""
        start, end = self._told, len(self.out)
        self._told = end
        spans = []
        bounds = [mark for mark, _ in self._marks[1:]] + [end]
        for (first, version), last in zip(self._marks, bounds, strict=True):
            first, last = max(first, start), min(last, end)
            if first < last:
                spans.append(Span(first, last - first, version))
        return Delta(self.index, self.out[start:end], self.logprobs[start:end], spans)

    def token_counts(self, vocabulary: int) -> Tensor:
        """How often each token was sampled so far."""
        if self._counts is None:
            self._counts = torch.bincount(
                torch.tensor(self.out, dtype=torch.long), minlength=vocabulary
            ).float()
        return self._counts

    def prompt_tokens_seen(self, vocabulary: int) -> Tensor:
        """Which tokens the prompt contains."""
        if self._seen is None:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool)
            self._seen[torch.tensor(self.request.prompt)] = True
        return self._seen
