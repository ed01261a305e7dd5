"""What rollouts of an environment say about the policy. Pure.

1. Only results count: a rollout that failed is no reward, and stands apart.
2. pass@k is the unbiased estimate 1 - C(n-c, k) / C(n, k) over the n results of an example of which c pass,
   and pass^k is C(c, k) / C(n, k); both are means over the examples that have at least k results.
3. The standard error is that of the mean over examples: rollouts of one example are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev

#: A rubric's weighted sum may be less than it is on paper: 0.7 + 0.2 + 0.1 is 0.9999999999999999.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Summary:
    """The figures of one evaluation."""

    results: int
    mean: float
    #: Of all results.
    deviation: float
    #: Of the mean; None for a single example.
    error: float | None
    #: Mean over examples of the deviation inside each, where it has two results or more.
    within: float | None
    #: Share of the examples with something to compare where all of it is alike.
    alike: float | None
    #: The reward from which on a result passes.
    threshold: float
    pass_at_k: Mapping[str, float]
    pass_all_k: Mapping[str, float]


def pass_at(n: int, c: int, k: int) -> float:
    """The chance that at least one of k results, drawn from n of which c pass, passes."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_all(n: int, c: int, k: int) -> float:
    """The chance that all k pass."""
    return math.comb(c, k) / math.comb(n, k)


def reaches(reward: float, bound: float) -> bool:
    """Whether it is so much or more, but for rounding."""
    return reward >= bound - ROUNDING


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to the limit."""
    return [1 << bit for bit in range(limit.bit_length()) if 1 << bit <= limit]


def summarise(
    groups: Mapping[int, Sequence[float]],
    threshold: float,
    rollouts_per_example: int,
    compared: Mapping[int, Sequence[Sequence[float]]] | None = None,
) -> Summary:
    """Figures of the rewards of each example; there is at least one. `compared` are the rewards in each that
    a trainer compares with each other, where those are not its rollouts' but their parts'."""
    groups = {index: rewards for index, rewards in groups.items() if rewards}
    rewards = [reward for one in groups.values() for reward in one]
    assert rewards, "who has no results has nothing to summarise"
    means = [fmean(one) for one in groups.values()]
    several = [one for one in groups.values() if len(one) > 1]
    lists = [[one] for one in groups.values()] if compared is None else compared.values()
    comparable = [each for each in lists if any(len(one) > 1 for one in each)]
    alike = [all(min(one) == max(one) for one in each) for each in comparable]
    counts = [(len(one), sum(reaches(reward, threshold) for reward in one)) for one in groups.values()]
    ks = [k for k in powers_of_two(rollouts_per_example) if any(n >= k for n, _ in counts)]
    return Summary(
        results=len(rewards),
        mean=fmean(rewards),
        deviation=pstdev(rewards),
        error=stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        within=fmean(pstdev(one) for one in several) if several else None,
        alike=fmean(alike) if alike else None,
        threshold=threshold,
        pass_at_k={str(k): fmean(pass_at(n, c, k) for n, c in counts if n >= k) for k in ks},
        pass_all_k={str(k): fmean(pass_all(n, c, k) for n, c in counts if n >= k) for k in ks},
    )


def mean(values: Sequence[float]) -> float:
    """nan where one of them is no finite number: fmean does not take two infinities of either sign."""
    return fmean(values) if all(map(math.isfinite, values)) else math.nan


def means_by_name(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The `mean` of each name over the rows that have it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: mean(values) for name, values in sorted(found.items())}
