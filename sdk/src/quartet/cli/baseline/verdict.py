"""Too hard, too easy, no diversity, or fit: what a baseline says, and what to change. Pure.

1. Too hard: no reward at all in ENOUGH attempts, unless they differ within groups: of penalties the smaller
   one is learned. Too easy: EASY of the full reward or more. No diversity: in ALIKE of the groups all rewards
   are equal, so that most of what is sampled moves nothing.
2. Advice names keys of the run, with their present values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quartet.run.statistics import Summary

#: The field's rules of thumb: "0 % after 10+ attempts" and "80 %".
ENOUGH, EASY = 10, 0.8
#: Three quarters of the sampling then buy nothing; a sparse but learnable task still has more.
ALIKE = 0.75
#: From here on answers are cut often enough to explain a bad result.
MUCH_CUT = 0.2

FIT, TOO_HARD, TOO_EASY, NO_DIVERSITY, UNCLEAR = "fit", "too hard", "too easy", "no diversity", "unclear"


@dataclass(frozen=True)
class Setting:
    """What the advice speaks of."""

    env_id: str
    rollouts_per_example: int
    temperature: float
    max_tokens: int | None
    full_reward: float


@dataclass(frozen=True)
class Verdict:
    """The word, why, and what to change."""

    word: str
    why: str
    advice: Sequence[str] = ()


def _unless_1(setting: Setting) -> str:
    return "" if setting.full_reward == 1 else f" of {setting.full_reward:g}"


def judge(figures: Summary, truncated: float, setting: Setting) -> Verdict:
    """The verdict on the results of one environment; `truncated` is the share that a limit cut."""
    share = figures.mean / setting.full_reward
    if figures.results < ENOUGH:
        return Verdict(
            UNCLEAR, f"{figures.results} attempts are too few to say", ["run more examples: -n 20 or more"]
        )
    if figures.mean <= 0 and _says_nothing(figures):
        return Verdict(
            TOO_HARD,
            f"0 % of the full reward after {figures.results} attempts: there is nothing to reinforce",
            _too_hard(truncated, setting),
        )
    if share >= EASY:
        return Verdict(
            TOO_EASY,
            f"{share:.0%} of the full reward{_unless_1(setting)} already, {EASY:.0%} or more: little is left "
            "to learn",
            [
                f'[[env]] id = "{setting.env_id}": args for harder examples (quartet env show lists them)',
                "or a smaller model, or a lower weight beside harder environments",
            ],
        )
    if figures.alike is None:
        return Verdict(UNCLEAR, "one rollout of each example shows no diversity", ["set -r to 2 or more"])
    if figures.alike >= ALIKE:
        return Verdict(
            NO_DIVERSITY,
            f"in {figures.alike:.0%} of the groups all rewards are equal: they move nothing",
            _no_diversity(truncated, setting),
        )
    if figures.mean <= 0:
        return Verdict(
            FIT,
            f"a mean reward of {figures.mean:.3g}, and {1 - figures.alike:.0%} of the groups have diverse "
            "rewards: what loses less is reinforced",
            _cut(truncated, setting),
        )
    return Verdict(
        FIT,
        f"{share:.0%} of the full reward{_unless_1(setting)}, above 0 % and under {EASY:.0%}; "
        f"{1 - figures.alike:.0%} of the groups have diverse rewards",
        _cut(truncated, setting),
    )


def _says_nothing(figures: Summary) -> bool:
    """Whether rewards hardly tell better from worse."""
    return figures.deviation == 0 if figures.alike is None else figures.alike >= ALIKE


def _too_hard(truncated: float, setting: Setting) -> list[str]:
    return [
        *_cut(truncated, setting),
        f'[[env]] id = "{setting.env_id}": args for easier examples (quartet env show lists them)',
        "a larger model, or the same one after quartet sft on a few hundred good answers",
        "a reward with partial credit, so that a step in the right direction earns something",
    ]


def _no_diversity(truncated: float, setting: Setting) -> list[str]:
    return [
        f"sampling.temperature (now {setting.temperature:g}): raise it"
        if setting.temperature < 1
        else f"sampling.temperature is {setting.temperature:g} already; more noise seldom helps",
        f"rollouts_per_example (now {setting.rollouts_per_example}): raise it, to 16 or 32",
        "a reward with more steps than right and wrong",
        f'[[env]] id = "{setting.env_id}": args for examples between those it always and never solves',
        *_cut(truncated, setting),
    ]


def _cut(truncated: float, setting: Setting) -> list[str]:
    if truncated < MUCH_CUT:
        return []
    if setting.max_tokens is None:
        return [f"a model that ends its answers: {truncated:.0%} of them ran to the context's end"]
    limit = f"sampling.max_tokens (now {setting.max_tokens})"
    return [f"{limit}: {truncated:.0%} of the answers were cut; raise it"]
