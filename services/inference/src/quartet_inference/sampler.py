"""Drawing tokens for all rows at once, in both engines.

1. The log-probability reported is that of the distribution after penalties and temperature and before any
   restriction: structure, `min_tokens`, top-k, top-p and min-p; for greedy rows it is taken at temperature 1.
2. A draw inverts the cumulative distribution at a number that depends only on the row's seed and on how many
   tokens it has sampled: equal seeds, weights and prompts give equal tokens, whoever else is in the batch.
3. Penalties, then temperature, then the structure or `min_tokens`, then min-p, then top-k, then top-p over
   what top-k left: vLLM's order and meaning. What a structure forbids, or what would end a row before its
   `min_tokens`, is sampled by no such row, greedy ones included, however improbable all that is left is.
4. Rows that need none of this pay for none of it: nothing of theirs is copied for the others.
5. The alternatives that a row asks for are the likeliest tokens of the distribution of its log-probability,
   excluded ones among them.
6. A row that its structure allows nothing has the log-probability infinity, which no distribution gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from quartet.seeds import completion_seeds
from torch import Tensor

from quartet_inference.engine import Request, Top
from quartet_inference.restriction import Restrictable, Restriction

U64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(value: U64) -> U64:
    """splitmix64's finaliser: 64 well-mixed bits of 64 bits."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    mixed: U64 = value ^ (value >> np.uint64(31))
    return mixed


def uniforms(seeds: U64, counts: U64) -> npt.NDArray[np.float64]:
    """One number in [0, 1 - 2**-52] for each (seed, count)."""
    bits = mix(mix(seeds) + (counts + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def seeds_of(request: Request, random: np.random.Generator) -> list[int]:
    """The seed of each of a request's completions; one that was resumed gets what it had before."""
    given = request.seeds or completion_seeds(int(random.integers(2**63)), request.n)
    seeds = np.array(given, dtype=np.uint64)
    return [int(one) for one in mix(seeds)]


class Row(Restrictable, Protocol):
    """What the sampler knows of a completion."""

    @property
    def seed(self) -> int:
        """Its own seed."""
        ...

    @property
    def top(self) -> int:
        """How many alternatives of each of its tokens are asked for."""
        ...

    def token_counts(self, vocabulary: int) -> Tensor:
        """How often each token was sampled so far, on the device of the logits."""
        ...

    def prompt_tokens_seen(self, vocabulary: int) -> Tensor:
        """Which tokens the prompt contains, on the device of the logits."""
        ...


class Sampler:
    """The parameters of a fixed list of rows, arranged for the step; made anew when rows join or leave."""

    def __init__(self, rows: Sequence[Row], device: torch.device | None = None) -> None:
        self._device = device
        sampling = [row.sampling for row in rows]
        self._rows = rows
        self._seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        temperatures = [s.temperature if s.temperature > 0 else 1.0 for s in sampling]
        self._temperatures = self._column(temperatures) if any(t != 1.0 for t in temperatures) else None
        greedy = [s.temperature == 0 for s in sampling]
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        penalised = [i for i, s in enumerate(sampling) if s.penalises]
        truncated = [i for i, s in enumerate(sampling) if s.truncates and s.temperature > 0]
        #: How many alternatives each row asks for, of the rows that do.
        self.asking = {i: row.top for i, row in enumerate(rows) if row.top}
        self._penalised, self._truncated = self._places(penalised), self._places(truncated)
        #: Those rows, as an index; None: there are none.
        self.asking_rows = self._places(list(self.asking))
        self._truncated_rows = truncated
        self._restrict()
        #: The rows whose structure allowed nothing in the last step.
        self.stuck: list[int] = []
        if penalised:
            chosen = [sampling[i] for i in penalised]
            self._penalised_rows = [rows[i] for i in penalised]
            self._repetition = self._column([s.repetition_penalty for s in chosen])
            self._presence = self._column([s.presence_penalty for s in chosen])
            self._frequency = self._column([s.frequency_penalty for s in chosen])
        if truncated:
            chosen = [sampling[i] for i in truncated]
            self._top_k = self._column([s.top_k for s in chosen])
            self._top_p = self._column([s.top_p for s in chosen], torch.float64)
            self._min_p = self._column([s.min_p for s in chosen])

    def _restrict(self) -> None:
        """Find the rows that are restricted now."""
        self._restriction = Restriction(self._rows, self._device)
        truncated, bound = self._truncated_rows, self._restriction.rows
        self._bound = self._places(bound)
        both = [row for row in truncated if row in set(bound)]
        #: The rows that are both, as an index into either.
        self._truncated_bound = self._places([truncated.index(row) for row in both])
        self._bound_truncated = self._places([bound.index(row) for row in both])

    def _places(self, rows: Sequence[int]) -> Tensor | None:
        """As an index; a list would be copied to the device in every step. None: there are none."""
        return torch.tensor(rows, device=self._device) if rows else None

    def _column(self, values: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)[:, None]

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor, dict[int, Top]]:
        """Token and log-probability of each row, from float32 logits [rows, vocabulary].

        And the alternatives of each row that asks for them.
        """
        tokens, logprobs = self.choose(logits)
        tops = {} if self.asking_rows is None else self._tops(logprobs[self.asking_rows])
        return tokens, logprobs.gather(-1, tokens[:, None])[:, 0], tops

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The token of each row, and the log-probabilities of all."""
        # First of all: a device goes on computing the logits meanwhile.
        if self._restriction.outdated:
            self._restrict()
        forbidden = None if self._bound is None else self._forbidden(logits.shape[-1])
        if self._penalised is not None:
            logits = logits.clone()
            logits[self._penalised] = self._penalise(logits[self._penalised])
        scaled = logits if self._temperatures is None else logits / self._temperatures
        logprobs = torch.log_softmax(scaled, -1)
        bound = None if forbidden is None else _restricted(logprobs, self._bound, forbidden)
        if bound is not None and len(bound) == len(logprobs):
            chances = bound.exp()
        else:
            chances = logprobs.exp()
            if bound is not None:
                chances[self._bound] = bound.exp()
        if self._truncated is not None:
            shaped = logprobs[self._truncated]
            if bound is not None and self._truncated_bound is not None:
                shaped[self._truncated_bound] = bound[self._bound_truncated]
            chances[self._truncated] = self._truncate(shaped).exp()
        counts = np.fromiter((row.sampled for row in self._rows), dtype=np.uint64, count=len(self._rows))
        # Float64: with a large vocabulary the float32 sum would drop the tail.
        cumulative = torch.cumsum(chances, -1, dtype=torch.float64)
        drawn = torch.from_numpy(uniforms(self._seeds, counts)).to(logits.device)
        targets = drawn[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, targets, right=True)
        # Only NaN in the logits leads past the end; the row is failed by its non-finite log-probability.
        tokens.clamp_(max=logits.shape[-1] - 1)
        if self._greedy is not None:
            best = logits.argmax(-1, keepdim=True)
            if bound is not None:
                best[self._bound] = bound.argmax(-1, keepdim=True)
            tokens = torch.where(self._greedy[:, None], best, tokens)
        for row in self.stuck:
            logprobs[row] = torch.inf
        return tokens[:, 0], logprobs

    def _forbidden(self, vocabulary: int) -> Tensor:
        """What the rows that are restricted may not sample."""
        forbidden, self.stuck = self._restriction.forbidden(vocabulary)
        return forbidden

    def _tops(self, logprobs: Tensor) -> dict[int, Top]:
        """Of the rows that ask."""
        most = min(max(self.asking.values()), logprobs.shape[-1])
        best = logprobs.topk(most, -1)
        pairs = zip(best.indices.cpu().tolist(), best.values.cpu().tolist(), strict=True)
        return {
            row: dict(zip(tokens[:top], values[:top], strict=True))
            for (row, top), (tokens, values) in zip(self.asking.items(), pairs, strict=True)
        }

    def _penalise(self, logits: Tensor) -> Tensor:
        rows, vocabulary = self._penalised_rows, logits.shape[-1]
        counts = torch.stack([row.token_counts(vocabulary) for row in rows])
        seen = torch.stack([row.prompt_tokens_seen(vocabulary) for row in rows]) | (counts > 0)
        repeated = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits = torch.where(seen, repeated, logits)
        return logits - self._frequency * counts - self._presence * (counts > 0)

    def _truncate(self, logprobs: Tensor) -> Tensor:
        """Excluded tokens become -inf; the rest is renormalised by the draw."""
        best = logprobs.amax(-1, keepdim=True)
        kept = logprobs.masked_fill(logprobs < best + self._min_p.log(), -torch.inf)
        ordered, order = kept.sort(stable=True, dim=-1, descending=True)
        ranks = torch.arange(ordered.shape[-1], device=logprobs.device)
        ordered = ordered.masked_fill((self._top_k > 0) & (ranks >= self._top_k), -torch.inf)
        mass = ordered.exp().to(torch.float64)
        mass /= mass.sum(-1, keepdim=True)
        before = mass.cumsum(-1) - mass  # the most likely token has nothing before it and always stays
        excluded = (before >= self._top_p) & (self._top_p < 1.0)
        ordered = ordered.masked_fill(excluded & (ranks > 0), -torch.inf)
        return torch.empty_like(kept).scatter_(-1, order, ordered)


def _restricted(logprobs: Tensor, rows: Tensor | None, forbidden: Tensor) -> Tensor:
    """Of these rows, what is not forbidden, the likeliest of it at 0: all may be too little for float32."""
    everyone = len(forbidden) == len(logprobs)
    bound = (logprobs if everyone else logprobs[rows]).masked_fill(forbidden, -torch.inf)
    return bound.sub_(bound.amax(-1, keepdim=True))
