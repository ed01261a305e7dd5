"""Parts: what of a group's rollouts is rewarded for itself, and what it is compared with.

A rollout is one part, unless its environment rewards the agents of an episode apart (`Rollout.parts`): then
what each of them did is one.

1. A part is compared with the parts of its own role in its group, siblings of its episode among them, and
   with nothing else: the two sides of a game are no measure of each other.
2. Every sample of a part has the part's advantage.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType

from quartet.v1.rollout_pb2 import Rollout, RolloutPart

from quartet_orchestrator import credit
from quartet_orchestrator.credit import Member

# A rule of somebody's own: the advantages of each of those that are compared.
Own = Callable[[Iterable[Sequence[Member]]], list[list[float]]]


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


def members_by_role(group: Iterable[Rollout]) -> dict[str, list[Member]]:
    """The same, with all that is known of each."""
    roles: dict[str, list[Member]] = {}
    for rollout in group:
        rewards, metrics = (MappingProxyType(dict(named)) for named in (rollout.rewards, rollout.metrics))
        samples = iter(rollout.samples)
        for part in parts_of(rollout):
            tokens = sum(len(next(samples).logprobs) for _ in range(part.samples))
            member = Member(
                reward=part.reward,
                rewards=rewards,
                metrics=metrics,
                completion_tokens=tokens,
                num_turns=rollout.num_turns,
                truncated=rollout.truncated,
                stop_condition=rollout.stop_condition,
                member=rollout.member,
                agent=part.agent,
            )
            roles.setdefault(part.agent, []).append(member)
    return roles


def advantages(kind: str, groups: Sequence[Sequence[Rollout]], own: Own | None = None) -> list[list[float]]:
    """Of each sample of each rollout, in order; `own` is what kind = "custom" goes by."""
    if kind == "custom":
        assert own is not None, "checked when the run was taken"
        members = [members_by_role(group) for group in groups]
        agents = [list(roles) for roles in members]
        credited = iter(own([compared for roles in members for compared in roles.values()]))
    else:
        rewards = [rewards_by_role(group) for group in groups]
        agents = [list(roles) for roles in rewards]
        credited = iter(
            credit.advantages(kind, [compared for roles in rewards for compared in roles.values()])
        )
    found: list[list[float]] = []
    for group, roles in zip(groups, agents, strict=True):
        of_role = {agent: iter(next(credited)) for agent in roles}
        found += [list(_of_samples(rollout, of_role)) for rollout in group]
    return found


def _of_samples(rollout: Rollout, of_role: dict[str, Iterator[float]]) -> Iterator[float]:
    for part in parts_of(rollout):
        advantage = next(of_role[part.agent])
        yield from [advantage] * part.samples
