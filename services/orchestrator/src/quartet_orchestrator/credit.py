"""Credit: from the rewards of a batch's groups to one advantage for each of them (whose: parts.py).

r is a reward, m and s are mean and population standard deviation over its group of n, S over the whole batch.

  grpo          (r - m) / (s + EPSILON)      GRPO, arXiv 2402.03300 section 4.1
  dr_grpo       r - m                        Dr. GRPO, arXiv 2503.20783: no s, and a constant normaliser
  rloo          (r - m) * n / (n - 1)        RLOO, arXiv 2402.14740: r minus the mean of the others
  reinforce_pp  (r - m) / (S + EPSILON)      REINFORCE++ with group baseline, arXiv 2501.03262; S of all r - m
  max_rl        (r - m) / m, 0 for m <= EPSILON  MaxRL: the maximum-likelihood gradient of rewards 0 and 1;
                                             cut at n - 1 and 1 - n, which only negative rewards go beyond
  gdpo          a / (S of all a + EPSILON)   GDPO, arXiv 2601.05242; a is the weighted sum of each reward
                                             function's own (r - m) / (s + EPSILON)
  none          r                            REINFORCE without a baseline
  zero          0                            what is learned comes from the loss: distillation

and what a function of somebody's own makes of what there is to know of a group (own_advantages.py).

1. Failures are not here: a caller passes rewards of rollouts that succeeded, only.
2. All advantages are finite; a group of equal rewards gets zeros (except `none`).
3. The normaliser follows from the aggregation: the number of covered tokens (token), of samples (sequence),
   or rollouts * constant_tokens (constant). With overlong filtering a rollout that a limit cut counts for the
   baseline of its group and for nothing else, unless all of a batch were cut: then their advantages are 0.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

# Keeps a group of nearly equal rewards from exploding; as in TRL and verl.
EPSILON = 1e-4

Groups = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of one of those that are compared: a rollout, or what one agent did in it."""

    #: What it earned: its weighted total, less algorithm.overlong_penalty.
    reward: float
    #: What each reward function said of it, without its weight, by name.
    rewards: Mapping[str, float]
    #: Of the rollout: each metric, by name.
    metrics: Mapping[str, float]
    #: Sampled tokens of it, which are what is trained on.
    completion_tokens: int
    #: Of the rollout: calls of the model, whether a limit cut it, what ended it.
    num_turns: int
    truncated: bool
    stop_condition: str
    #: Which rollout of its group it is, from 0.
    member: int
    #: The role of the agent; empty where the rollout is one thing.
    agent: str


@dataclass(frozen=True)
class Size:
    """What a batch, or a part of it, puts before the loss."""

    tokens: int = 0
    samples: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.tokens + other.tokens, self.samples + other.samples)


def gdpo(groups: Sequence[Sequence[Member]], weights: Mapping[str, float]) -> list[list[float]]:
    """One advantage for each member, in its place; functions without a weight weigh 1."""
    # Of a group the mean is 0 already, so that of the batch is.
    return _of_the_batch([_summed(group, weights) for group in groups])


def advantages(kind: str, groups: Groups) -> list[list[float]]:
    """One advantage for each reward, in its place; `kind` is a key of CREDIT. No group may be empty."""
    assert groups and all(len(group) > 0 for group in groups)
    assert all(math.isfinite(reward) for group in groups for reward in group)
    return CREDIT[kind](groups)


def normalizer(aggregation: str, size: Size, *, rollouts: int, constant_tokens: int | None) -> float:
    """What the batch's summed loss is divided by."""
    assert size.tokens > 0 and size.samples > 0 and rollouts > 0
    if aggregation == "constant":
        assert constant_tokens is not None, "checked when the run was submitted"
        return float(rollouts * constant_tokens)
    return float(size.samples if aggregation == "sequence" else size.tokens)


def _centred(group: Sequence[float]) -> list[float]:
    mean = fmean(group)
    # Exactly zero where all rewards are equal, whatever rounding did to the mean.
    return [0.0] * len(group) if min(group) == max(group) else [reward - mean for reward in group]


def _deviation(centred: Sequence[float]) -> float:
    return math.sqrt(fmean([a * a for a in centred]))


def _normalised(group: Sequence[float]) -> list[float]:
    centred = _centred(group)
    scale = _deviation(centred) + EPSILON
    return [a / scale for a in centred]


def _of_the_batch(centred: Groups) -> list[list[float]]:
    scale = _deviation([a for group in centred for a in group]) + EPSILON
    return [[a / scale for a in group] for group in centred]


def _summed(group: Sequence[Member], weights: Mapping[str, float]) -> list[float]:
    """What each function makes of a group, among those that it rewarded; where none has a name, the whole
    reward is the only one."""
    # Sorted: maps of messages have no order, and equal records have equal sums, bit for bit.
    names = sorted({name for one in group for name in one.rewards})
    if not names:
        return _normalised([one.reward for one in group])
    total = [0.0] * len(group)
    for name in names:
        rewarded = [at for at, one in enumerate(group) if name in one.rewards]
        normalised = _normalised([group[at].rewards[name] for at in rewarded])
        for at, a in zip(rewarded, normalised, strict=True):
            total[at] += weights.get(name, 1.0) * a
    return total


def _grpo(groups: Groups) -> list[list[float]]:
    return [_normalised(group) for group in groups]


def _dr_grpo(groups: Groups) -> list[list[float]]:
    return [_centred(group) for group in groups]


def _rloo(groups: Groups) -> list[list[float]]:
    # Nobody else in the group: no baseline, no signal.
    return [[a * len(g) / (len(g) - 1) if len(g) > 1 else 0.0 for a in _centred(g)] for g in groups]


def _reinforce_pp(groups: Groups) -> list[list[float]]:
    return _of_the_batch([_centred(group) for group in groups])


def _max_rl(groups: Groups) -> list[list[float]]:
    def weighted(group: Sequence[float]) -> list[float]:
        mean = fmean(group)
        # A mean this small carries no success to weight by; dividing would only amplify rounding.
        if mean <= EPSILON:
            return [0.0] * len(group)
        # What rewards that are not negative can come to. Of others the mean says nothing of their size.
        most = len(group) - 1.0
        return [max(-most, min(most, a / mean)) for a in _centred(group)]

    return [weighted(group) for group in groups]


def _none(groups: Groups) -> list[list[float]]:
    return [list(group) for group in groups]


def _zero(groups: Groups) -> list[list[float]]:
    return [[0.0] * len(group) for group in groups]


CREDIT: Mapping[str, Callable[[Groups], list[list[float]]]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "reinforce_pp": _reinforce_pp,
    "max_rl": _max_rl,
    "none": _none,
    "zero": _zero,
}
