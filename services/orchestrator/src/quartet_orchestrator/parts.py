"""Parts: what of a group's rollouts is rewarded for itself, and what it is compared with.

A rollout is one part, unless its environment rewards the agents of an episode apart (`Rollout.parts`): then
what each of them did is one.

1. A part is compared with the parts of its own role in its group, siblings of its episode among them, and
   with nothing else: the two sides of a game are no measure of each other.
2. Every sample of a part has the part's advantage.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quartet.v1.rollout_pb2 import Rollout, RolloutPart

from quartet_orchestrator import credit


def parts_of(rollout: Rollout) -> Sequence[RolloutPart]:
    """At least one; together they have the rollout's samples."""
    return rollout.parts or [RolloutPart(reward=rollout.reward, samples=len(rollout.samples))]


def rewards_by_role(group: Iterable[Rollout]) -> dict[str, list[float]]:
    """What is compared with each other in a group, in the order of its rollouts."""
    roles: dict[str, list[float]] = {}
    for rollout in group:
        for part in parts_of(rollout):
            roles.setdefault(part.agent, []).append(part.reward)
    return roles


def have_spread(roles: Iterable[Sequence[float]]) -> bool:
    """Whether anything compared with each other differs."""
    return any(min(rewards) < max(rewards) for rewards in roles)


def advantages(kind: str, groups: Sequence[Sequence[Rollout]]) -> list[list[float]]:
    """Of each sample of each rollout, in order."""
    compared = [rewards_by_role(group) for group in groups]
    credited = iter(credit.advantages(kind, [rewards for roles in compared for rewards in roles.values()]))
    found: list[list[float]] = []
    for group, roles in zip(groups, compared, strict=True):
        of_role = {agent: iter(next(credited)) for agent in roles}
        found += [list(_of_samples(rollout, of_role)) for rollout in group]
    return found


def _of_samples(rollout: Rollout, of_role: dict[str, Iterator[float]]) -> Iterator[float]:
    for part in parts_of(rollout):
        advantage = next(of_role[part.agent])
        yield from [advantage] * part.samples
