"""What became of the groups that were dispatched for a step: what was trained on, with which advantage, and
what was not, and why. For the event of the step.

1. The advantages are those that the trainer was sent: credit follows from the journal (batches.py 1). A
   function of one's own is asked again where another process had asked it: one that was changed since tells
   what it gives now, and of one that raises there are no advantages. The step is trained all the same.
2. At most FATES_BYTES of it; what is left out are groups that were given up, of which there may be any
   number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quartet.run.algorithm import AlgorithmConfig
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.rollout_pb2 import Rollout

from quartet_orchestrator import batches, parts
from quartet_orchestrator.outage import RunInterrupted

# Of a message of 4 MiB, in which the metrics are, too.
FATES_BYTES = 1 << 20
# Tag and length of a group inside the event.
OVERHEAD_BYTES = 4


#: Of each mini-batch of a batch, the rollouts that were trained on, in the order in which they were sent, and
#: the advantages of each one's samples.
Credited = Sequence[tuple[list[Rollout], list[list[float]]]]


def credited(
    algorithm: AlgorithmConfig, groups: Sequence[Sequence[Rollout]], own: parts.Own | None
) -> Credited:
    """Of the groups of a closed batch, each with its rollouts that succeeded, in order of their places. Empty
    where their samples were given up, or `own` refuses them."""
    if any(not rollout.samples for group in groups for rollout in group):
        return []
    count = algorithm.num_minibatches
    try:
        return [
            batches.credited(algorithm, groups, part if count > 1 else None, own) for part in range(count)
        ]
    except RunInterrupted:
        return []


def trained(
    algorithm: AlgorithmConfig, numbers: Sequence[int], groups: Sequence[Sequence[Rollout]], found: Credited
) -> list[pb.GroupFate]:
    """Of the same groups, by their numbers; `found` is what they were credited with. Empty where that is."""
    if not found:
        return []
    advantages = {
        id(rollout): its_own
        for rollouts, of_each in found
        for rollout, its_own in zip(rollouts, of_each, strict=True)
    }
    return [_fate(algorithm, *one, advantages) for one in zip(numbers, groups, strict=True)]


def bounded(fates: Iterable[pb.GroupFate]) -> Iterator[pb.GroupFate]:
    """As many as an event has room for."""
    left = FATES_BYTES
    for fate in fates:
        left -= fate.ByteSize() + OVERHEAD_BYTES
        if left < 0:
            return
        yield fate


def _fate(
    algorithm: AlgorithmConfig, number: int, group: Sequence[Rollout], advantages: dict[int, list[float]]
) -> pb.GroupFate:
    fate = pb.GroupFate(group=number)
    for rollout in group:
        its_own = advantages.get(id(rollout))
        if its_own is not None:
            fate.members.append(rollout.member)
            fate.advantages.append(_mean(rollout, its_own))
        elif rollout.truncated and algorithm.overlong_filtering:
            fate.overlong.append(rollout.member)
        else:
            fate.without_advantage.append(rollout.member)
    return fate


def _mean(rollout: Rollout, advantages: Sequence[float]) -> float:
    """Over what the samples cover: agents of one rollout may have different ones."""
    if min(advantages) == max(advantages):
        return advantages[0]
    tokens = [len(sample.logprobs) for sample in rollout.samples]
    return sum(a * n for a, n in zip(advantages, tokens, strict=True)) / sum(tokens)
