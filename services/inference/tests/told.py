"""What an engine told of a completion, against a plain forward pass of transformers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

#: Largest |log-probability - plain forward| in float32.
TOLERANCE = {"embedded": 2e-5, "vllm": 5e-5}


@dataclass
class Told:
    """One completion; `finish` is the engine's, or the service's."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    finish: Any = None
    routed: Any = None  # the engine's, where experts are asked for

    @property
    def text(self) -> str:
        """As the service has it."""
        return str(self.finish.message.content)

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed, as the engine has it."""
        return int(self.finish.cached_tokens)

    def extend(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[tuple[int, ...]],
        tops: Sequence[dict[int, float]] = (),
    ) -> None:
        """Take one delta; its spans (start, length, version) go on where those before ended."""
        assert self.finish is None and 1 <= len(ids) <= 64
        for start, length, version in spans:
            assert start == len(self.versions) and length > 0
            self.versions.extend([version] * length)
        self.tokens.extend(ids)
        self.logprobs.extend(logprobs)
        self.tops.extend(tops)
        assert len(self.tops) in (0, len(self.tokens))
        assert len(self.versions) == len(self.tokens) == len(self.logprobs)

    def difference(self, models: Mapping[int, Any], **shaping: Any) -> float:
        """The largest |engine - plain forward| over all tokens, by the version stamped on each."""
        worst = 0.0
        for version in set(self.versions):
            plain = chosen(distribution(models[version], self.prompt, self.tokens, **shaping), self.tokens)
            mine = torch.tensor(self.versions) == version
            worst = max(worst, (plain - torch.tensor(self.logprobs))[mine].abs().max().item())
        return worst


def tops_difference(told: Told, models: Mapping[int, Any], top: int, **shaping: Any) -> float:
    """The largest |engine - plain forward| over the `top` alternatives of all tokens, the best first.

    Both of the alternatives that were told, and of those that should have been: they differ where tokens tie.
    """
    assert len(told.tops) == len(told.tokens) > 0
    worst = 0.0
    rows = {v: distribution(models[v], told.prompt, told.tokens, **shaping) for v in set(told.versions)}
    for at, have in enumerate(told.tops):
        plain = rows[told.versions[at]][at]
        values = torch.tensor(list(have.values()))
        assert len(have) == top and values.tolist() == sorted(values.tolist(), reverse=True)
        for wanted in (plain[list(have)], plain.topk(top).values):
            worst = max(worst, (values - wanted).abs().max().item())
        token, logprob = told.tokens[at], told.logprobs[at]
        assert have.get(token, logprob) == logprob, "the token's own, to the bit"
        assert token in have or logprob <= values[-1]
    return worst


def on_bfloat16_grid(told: Told) -> float:
    """The share of differences between alternatives that are multiples of 2**-10.

    All of them are where logits of an eighth or more were rounded to bfloat16.
    """
    steps = [
        (best - one) * 2**10 for best, *others in map(list, map(dict.values, told.tops)) for one in others
    ]
    return sum(abs(step - round(step)) < 0.01 for step in steps) / len(steps)


@torch.no_grad()
def distribution(
    model: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> torch.Tensor:
    """The log-probabilities before each token, after penalties and temperature: [tokens, vocabulary]."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    if (repetition_penalty, presence_penalty, frequency_penalty) != (1.0, 0.0, 0.0):
        for position in range(len(tokens)):
            counts = Counter(tokens[:position])
            seen = torch.tensor(sorted({*prompt, *counts}))
            row = logits[position]
            factor = torch.where(row[seen] > 0, 1 / repetition_penalty, repetition_penalty)
            row[seen] *= factor
            for token, count in counts.items():
                row[token] -= frequency_penalty * count + presence_penalty
    return torch.log_softmax(logits / (temperature or 1.0), -1)


@torch.no_grad()
def behind_kept_keys(models: Mapping[int, Any], answer: Told) -> torch.Tensor:
    """The log-probabilities before each token where keys outlive an update: those of a token are computed by
    the version that samples the next one."""
    from quartet_inference.embedded.hub import CACHE
    from transformers import DynamicCache

    cache, rows, first = DynamicCache(), [], 0
    inputs = [*answer.prompt, *answer.tokens]
    while first < len(answer.tokens):
        version = answer.versions[first]
        end = first + answer.versions.count(version)
        known = cache.get_seq_length()
        ids = torch.tensor([inputs[known : len(answer.prompt) + end - 1]])
        logits = models[version](ids, use_cache=True, **{CACHE: cache}).logits[0]
        rows.append(torch.log_softmax(logits[-(end - first) :].float(), -1))
        first = end
    return torch.cat(rows)


def chosen(rows: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """What each row says of its token."""
    return rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def scores(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """The log-probability of every token but the first."""
    return chosen(distribution(model, tokens[:1], tokens[1:]), tokens[1:])


def best(model: Any, tokens: Sequence[int], count: int) -> list[dict[int, float]]:
    """The likeliest tokens in the place of every token but the first."""
    rows = distribution(model, tokens[:1], tokens[1:]).topk(count)
    pairs = zip(rows.indices.tolist(), rows.values.tolist(), strict=True)
    return [dict(zip(*pair, strict=True)) for pair in pairs]


def random_prompt(rng: random.Random, longest: int = 120) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randint(1, longest))]
