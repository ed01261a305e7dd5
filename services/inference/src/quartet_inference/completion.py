"""One completion on its way: what was sampled, what ends it, and what has been told of it.

1. A completion ends at an end token, a stop token or a stop string (all included in its tokens) or at
   `max_tokens`.
2. Tokens leave in pieces of FLUSH_TOKENS, or one by one where somebody watches, and at the end; each is told
   exactly once.
3. Tokens that were sampled elsewhere (Request.resumed) count as sampled in every respect and are not told:
   positions go on after them, and a completion that they end is ended.
4. Alternatives are held until they are told, and no longer.
5. Where it follows a structure here (`follower`), every sampled token is accepted there too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from quartet_inference.engine import Delta, Finish, Reason, Request, Sampling, Span, Stamp, Top
from quartet_inference.stop_strings import StopWatch
from quartet_inference.structure.following import Follower

#: Tokens per message: small enough to follow a completion, large enough that messages cost little.
FLUSH_TOKENS = 32


@dataclass(eq=False)
class Completion:
    """One of a request's completions, in any engine."""

    request: Request
    index: int
    seed: int
    end_tokens: frozenset[int]
    watch: StopWatch | None
    cached_tokens: int | None = field(default=None, init=False)
    out: list[int] = field(default_factory=list, init=False)  # all that were sampled
    logprobs: list[float] = field(default_factory=list, init=False)  # of those that were sampled here
    finish: Finish | None = field(default=None, init=False)
    # Behind what was sampled; None: anything may be sampled, or another process sees to it.
    follower: Follower | None = field(default=None, init=False)
    _told: int = field(default=0, init=False)
    _tops: list[Top] = field(default_factory=list, init=False)  # of the untold, where they are asked for
    _marks: list[tuple[int, Stamp]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        prompt = self.request.prompt
        for token in prompt[len(prompt) - self.request.resumed :]:
            if self.finish is None:
                self.out.append(token)
                self.finish = self._end_at(token)
        self._told = len(self.out)

    @property
    def sampling(self) -> Sampling:
        """How it is sampled."""
        return self.request.sampling

    @property
    def top(self) -> int:
        """How many alternatives of each token are asked for."""
        return self.request.top

    @property
    def sampled(self) -> int:
        """How many tokens were sampled so far."""
        return len(self.out)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end it."""
        return self.sampling.ends(self.end_tokens)

    def accept(self, token: int, logprob: float, stamp: Stamp, top: Top | None = None) -> Finish | None:
        """Append a sampled token, with its alternatives where they are asked for; the end, if it is one."""
        if not self._marks or self._marks[-1][1] != stamp:
            self._marks.append((len(self.out), stamp))
        self.out.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self._tops.append(top)
        if self.follower is not None:
            self.follower.accept(token)
        self.finish = self._end_at(token)
        return self.finish

    def _end_at(self, token: int) -> Finish | None:
        if token in self.end_tokens and not self.sampling.ignore_eos:
            return self._ended(Reason.STOP)
        if token in self.sampling.stop_token_ids:
            return self._ended(Reason.STOP, token=token)
        match = self.watch.feed(token) if self.watch is not None else None
        if match is not None:
            return self._ended(Reason.STOP, match)
        return self._ended(Reason.LENGTH) if len(self.out) >= self.sampling.max_tokens else None

    def _ended(self, reason: Reason, match: str = "", token: int | None = None) -> Finish:
        return Finish(self.index, reason, match, token, self.cached_tokens or 0)

    @cached_property
    def piece(self) -> int:
        """Tokens that are told together."""
        return 1 if self.request.watched else FLUSH_TOKENS

    @property
    def has_piece(self) -> bool:
        """Whether there is one that is not yet delivered."""
        return len(self.out) - self._told >= self.piece

    def tell(self) -> Delta:
        """Deliver what has not been delivered."""
        start, end = self._told, len(self.out)
        elsewhere = end - len(self.logprobs)
        self._told = end
        spans = []
        bounds = [mark for mark, _ in self._marks[1:]] + [end]
        for (first, stamp), last in zip(self._marks, bounds, strict=True):
            first, last = max(first, start), min(last, end)
            if first < last:
                spans.append(Span(first, last - first, *stamp))
        tops = tuple(self._tops)
        self._tops.clear()
        return Delta(self.index, self.out[start:end], self.logprobs[start - elsewhere :], spans, tops)
