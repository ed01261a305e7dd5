"""Verification: are the sampler's log-probabilities those of the version it stamped on each token?

1. Every token is recomputed under the published weights of its own version, as they were published, in
   float32.
2. Tokens of a version that is no longer retained are counted, not guessed.
3. Where the published weights are the live ones, the log-probabilities of the training pass are used again:
   same function, same bits.
4. Of each sample it is told apart, so that whoever knows where it was sampled sees which sampler is off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quartet_trainer.publish import Snapshot
from quartet_trainer.sample import Floats, Sample

#: Log-probabilities of the covered positions of each sample under given weights.
Score = Callable[[Sequence[Sample], Snapshot], Sequence[Floats]]


@dataclass(frozen=True, slots=True)
class Verification:
    """How far sampler and trainer are apart under equal weights."""

    max_difference: float
    mean_difference: float
    tokens_compared: int
    tokens_skipped: int
    #: Of each sample: the mean of what was compared of it, 0 where that is nothing, and of how many tokens.
    of_samples: Sequence[tuple[float, int]]


def verify(
    samples: Sequence[Sample],
    retained: Mapping[int, Snapshot],
    score: Score,
    live_version: int | None,
    live_logprobs: Sequence[Floats],
) -> Verification:
    """Compare every covered token that has a sampler's log-probability."""
    sampled = [index for index, sample in enumerate(samples) if sample.logprobs_K is not None]
    skipped = sum(len(sample.covered_K) for sample in samples if sample.logprobs_K is None)
    versions = sorted({int(version) for index in sampled for version in np.unique(samples[index].versions_K)})
    differences: list[Floats] = []
    of_each: list[list[Floats]] = [[] for _ in samples]
    for version in versions:
        holders = [index for index in sampled if (samples[index].versions_K == version).any()]
        chosen = [samples[index] for index in holders]
        if version not in retained:
            skipped += sum(int((sample.versions_K == version).sum()) for sample in chosen)
            continue
        if version == live_version:
            scored: Sequence[Floats] = [live_logprobs[index] for index in holders]
        else:
            scored = score(chosen, retained[version])
        for index, sample, ours in zip(holders, chosen, scored, strict=True):
            assert sample.logprobs_K is not None
            found = np.abs(ours - sample.logprobs_K)[sample.versions_K == version]
            differences.append(found)
            of_each[index].append(found)
    of_samples = [_mean(parts) for parts in of_each]
    if not differences:
        return Verification(0.0, 0.0, 0, skipped, of_samples)
    all_of_them = np.concatenate(differences).astype(np.float64)
    most, mean = float(all_of_them.max()), float(all_of_them.mean())
    return Verification(most, mean, len(all_of_them), skipped, of_samples)


def _mean(parts: Sequence[Floats]) -> tuple[float, int]:
    """Over all values, and how many these are."""
    if not parts:
        return 0.0, 0
    values = np.concatenate(parts).astype(np.float64)
    return float(values.mean()), len(values)
