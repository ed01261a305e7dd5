"""Every engine: thousands of sampled tokens, each against the exact distribution that it was drawn from.

Where a token's interval of the cumulative distribution lies is known from a plain forward pass. A point of
it, taken at random, is uniform on [0, 1) where tokens are drawn as they should be, whatever came before;
pairs of such points are uniform on the square where draws do not depend on each other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from .conformance import Replica
from .told import Told, distribution, random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPTS, MEMBERS, TOKENS = 6, 16, 24
BINS, SIDE = 64, 8
#: A right engine fails one comparison in a million. (61,440 tokens of each were right, too.)
CHANCE = 1e-6
#: Of tokens at the edge of what top-p or min-p keeps, where float32 decides.
AT_THE_EDGE = 3
HELD_BACK = list(range(0, 260, 3))

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 7},
    {"top_p": 0.7, "temperature": 1.3},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 0.8, "temperature": 1.5, "top_p": 0.95},
    {"min_tokens": TOKENS, "stop_token_ids": HELD_BACK},
    {"min_tokens": TOKENS, "stop_token_ids": HELD_BACK, "temperature": 1.4, "top_k": 30, "top_p": 0.8},
]


def kept(
    rows: torch.Tensor,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop_token_ids: Sequence[int] = (),
    **_: Any,
) -> torch.Tensor:
    """Probabilities of what is left: what ends nothing, then min-p, then the k likeliest, then of those the
    fewest that have p."""
    chances = rows.double().exp()
    chances[:, list(stop_token_ids)] = 0.0
    chances /= chances.sum(-1, keepdim=True)
    chances[chances < min_p * chances.amax(-1, keepdim=True)] = 0.0
    ordered, order = chances.sort(-1, descending=True)
    if top_k:
        ordered[:, top_k:] = 0.0
    ordered /= ordered.sum(-1, keepdim=True)
    if top_p < 1.0:
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0.0
    ordered /= ordered.sum(-1, keepdim=True)
    return torch.zeros_like(chances).scatter_(-1, order, ordered)


def points(model: Any, answer: Told, rng: torch.Generator, **sampling: Any) -> torch.Tensor:
    """One of each token's interval; NaN where it should not have been drawn."""
    restricting = ("top_k", "top_p", "min_p", "min_tokens", "stop_token_ids")
    shaping = {key: value for key, value in sampling.items() if key not in restricting}
    chances = kept(distribution(model, answer.prompt, answer.tokens, **shaping), **sampling)
    drawn = torch.tensor(answer.tokens)[:, None]
    width = chances.gather(-1, drawn)[:, 0]
    low = (chances.cumsum(-1) - chances).gather(-1, drawn)[:, 0]
    inside = low + width * torch.rand(len(width), generator=rng, dtype=torch.float64)
    return torch.where(width > 0, inside, torch.nan)


def chance(values: torch.Tensor, bins: int) -> float:
    """How likely uniform values differ as much from being equally many in each bin (chi-square)."""
    counts = torch.bincount((values * bins).long().clamp(max=bins - 1), minlength=bins).double()
    expected = counts.sum() / bins
    statistic = ((counts - expected).square() / expected).sum()
    degrees = torch.tensor((bins - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


def chance_of_pairs(one: torch.Tensor, other: torch.Tensor) -> float:
    """The same of pairs, in squares."""
    squares = (one * SIDE).long() * SIDE + (other * SIDE).long()
    return chance((squares + 0.5) / SIDE**2, SIDE**2)


async def groups_of(replica: Replica, seeded: bool, **sampling: Any) -> list[list[Told]]:
    rng = random.Random(17)
    wanted = {"max_tokens": TOKENS, "ignore_eos": True, **sampling}
    prompts = [random_prompt(rng, 60) for _ in range(PROMPTS)]
    seeds: Sequence[dict[str, int]] = [{"seed": number} if seeded else {} for number in range(PROMPTS)]
    calls = [
        replica.ask(prompt, n=MEMBERS, **seed, **wanted) for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    return list(await asyncio.gather(*calls))


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: ",".join(sampling) or "plain")
async def test_tokens_follow_their_distributions_and_nothing_else(
    replica: Replica, sampling: dict[str, Any], seeded: bool
) -> None:
    """sampler.py 2 and 3."""
    model = replica.models[max(replica.models)]
    rng = torch.Generator().manual_seed(5)
    groups = await groups_of(replica, seeded, **sampling)
    found = torch.stack(
        [torch.stack([points(model, answer, rng, **sampling) for answer in group]) for group in groups]
    )
    assert int(found.isnan().sum()) <= AT_THE_EDGE
    found = found.nan_to_num(0.5)  # [prompts, members, tokens]
    chances = {
        "tokens": chance(found.flatten(), BINS),
        "first tokens": chance(found[:, :, 0].flatten(), SIDE),
        "a token and the next": chance_of_pairs(found[:, :, :-1].flatten(), found[:, :, 1:].flatten()),
        "a member and the next": chance_of_pairs(found[:, :-1].flatten(), found[:, 1:].flatten()),
        "a prompt and the next": chance_of_pairs(found[:-1].flatten(), found[1:].flatten()),
    }
    assert min(chances.values()) > CHANCE, chances
