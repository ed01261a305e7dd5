"""How far the trainer's log-probabilities are from the sampler's, of each replica of inference apart: what is
wrong with one of eight is an eighth of that in the mean of all.

1. From what the trainer said of each sample of a batch's first pass, under equal weights, and from whom its
   rollout says sampled it. One that several replicas sampled, as where one of them died, counts for none.
2. A replica is told of from FEWEST_TOKENS on: the mean of a few is rounding's. Where one sampled everything
   it is the mean of all, which is told anyway.
3. At most MAX_REPLICAS of them in a step, those that are farthest off, and MAX_NAMES in a run, those that
   came first: in a tier of pods each that comes anew has an address of its own. Of the others the farthest is
   told, as OTHERS.

Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.rollout_pb2 import Rollout

#: Of a step, "train/logprob_difference_by_replica/HOST:PORT": series of whoever follows the run.
MAX_REPLICAS: Final = 16
MAX_NAMES: Final = 64
OTHERS: Final = "others"
FEWEST_TOKENS: Final = 100


def differences(
    verified: Sequence[tpb.LogprobVerification], trained_on: Sequence[Sequence[Rollout]]
) -> dict[str, float]:
    """The mean difference by the replica's address. `verified`: of each mini-batch; `trained_on`: its
    rollouts, in the order in which their samples were sent."""
    sums: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    for found, rollouts in zip(verified, trained_on, strict=True):
        samplers = [_sampler(rollout) for rollout in rollouts for _ in rollout.samples]
        # Not by a trainer of an earlier release, or of one's own; nor where the choice of rollouts is another
        # now (fates.py 1).
        if not len(samplers) == len(found.sample_differences) == len(found.sample_tokens):
            return {}
        for sampler, mean, count in zip(samplers, found.sample_differences, found.sample_tokens, strict=True):
            sums[sampler] += mean * count
            tokens[sampler] += count
    if len(tokens.keys() - {""}) < 2:
        return {}
    means = {one: sums[one] / count for one, count in tokens.items() if one and count >= FEWEST_TOKENS}
    return dict(sorted(means.items(), key=lambda one: one[1], reverse=True)[:MAX_REPLICAS])


def bounded(found: dict[str, float], told: Collection[str]) -> dict[str, float]:
    """The same, farthest first, by names of which the run has told those before."""
    named: dict[str, float] = {}
    room = MAX_NAMES - len(told)
    for replica, difference in found.items():
        if replica in told:
            named[replica] = difference
        elif room > 0:
            room -= 1
            named[replica] = difference
        else:
            named.setdefault(OTHERS, difference)
    return named


def _sampler(rollout: Rollout) -> str:
    """Who sampled all of it; empty where no single one did, or it is not known."""
    return rollout.replicas[0] if len(rollout.replicas) == 1 else ""
