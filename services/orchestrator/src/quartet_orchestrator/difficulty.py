"""Difficulty: which complete groups teach too little to be trained on, and by which of their rewards.

1. What says that a group is too easy or too hard is the mean of its rollouts' rewards. What says that its
   rewards differ too little is what is compared with each other in it (parts.py): the role that differs most
   counts. Where each is alone in its role nothing is compared, and nothing differs too little.
2. The verdict does not depend on the order in which rollouts ended, so it is the same after a restart.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean, pvariance

from quartet.run.difficulty import DifficultyFilterConfig

from quartet_orchestrator.parts import have_spread

# Why a group is discarded: its rewards are all alike, differ too little, are too high, too low.
NO_SPREAD, LOW_VARIANCE, TOO_EASY, TOO_HARD = "no_spread", "low_variance", "too_easy", "too_hard"
REPLACED = frozenset({NO_SPREAD, LOW_VARIANCE, TOO_EASY, TOO_HARD})


def verdict(
    bounds: DifficultyFilterConfig,
    rewards: Sequence[float],
    compared: Collection[Sequence[float]],
    *,
    needs_spread: bool = True,
) -> str | None:
    """Why a complete group is to be replaced, if it is.

    `rewards` of its rollouts, `compared` with each other within each role. Where the filter is off, dynamic
    sampling asks, and only rewards that are all alike count; where advantages are not of a comparison they do
    not (`needs_spread`).
    """
    if bounds.enabled:
        mean = fmean(rewards)
        if bounds.max_reward is not None and mean > bounds.max_reward:
            return TOO_EASY
        if bounds.min_reward is not None and mean < bounds.min_reward:
            return TOO_HARD
    if not needs_spread or all(len(one) == 1 for one in compared):
        return None
    if not have_spread(compared):
        return NO_SPREAD
    if bounds.enabled and max(map(pvariance, compared)) < bounds.min_reward_variance:
        return LOW_VARIANCE
    return None
