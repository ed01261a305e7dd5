"""Parts: what of a group's rollouts is rewarded for itself, and what it is compared with.

A rollout is one part, unless its environment rewards the agents of an episode apart (`Rollout.parts`): then
what each of them did is one.

1. A part is compared with the parts of its own role in its group, siblings of its episode among them, and
   with nothing else: the two sides of a game are no measure of each other.
2. Every sample of a part has the part's advantage.
3. What is compared is rewards as the environment gave them, less what each part's own length takes from them
   (overlong.py).

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType

from quartet.run.algorithm_tables import OverlongPenaltyConfig
from quartet.run.statistics import means_by_name
from quartet.v1.rollout_pb2 import Rollout, RolloutPart

from quartet_orchestrator import credit
from quartet_orchestrator.credit import Member
from quartet_orchestrator.overlong import penalty

# A rule of somebody's own: the advantages of each of those that are compared.
Own = Callable[[Iterable[Sequence[Member]]], list[list[float]]]


def parts_of(rollout: Rollout) -> Sequence[RolloutPart]:
    """At least one; together they have the rollout's samples."""
    if rollout.parts:
        return rollout.parts
    return [RolloutPart(reward=rollout.reward, samples=len(rollout.samples), rewards=rollout.rewards)]


def rewards_by_role(group: Iterable[Rollout]) -> dict[str, list[float]]:
    """What is compared with each other in a group, in the order of its rollouts."""
    roles: dict[str, list[float]] = {}
    for rollout in group:
        for part in parts_of(rollout):
            roles.setdefault(part.agent, []).append(part.reward)
    return roles


def means_by_agent(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """What agents of each role earned, the mean over the rollouts that have one; empty where there is but one
    role, whose mean is the rollouts' own."""
    of_each = [
        {agent: fmean(rewards) for agent, rewards in rewards_by_role([rollout]).items()}
        for rollout in rollouts
        if rollout.parts
    ]
    found = means_by_name(of_each)
    return found if len(found) > 1 else {}


def have_spread(roles: Iterable[Sequence[float]]) -> bool:
    """Whether anything compared with each other differs."""
    return any(min(rewards) < max(rewards) for rewards in roles)


def members_by_role(
    group: Iterable[Rollout], overlong: OverlongPenaltyConfig | None = None
) -> dict[str, list[Member]]:
    """The same, with all that is known of each, and rewards less their penalties."""
    roles: dict[str, list[Member]] = {}
    for rollout in group:
        metrics = MappingProxyType(dict(rollout.metrics))
        samples = iter(rollout.samples)
        # A host or a journal of an earlier release tells those of the whole rollout alone.
        told_apart = any(part.rewards for part in rollout.parts)
        for part in parts_of(rollout):
            tokens = sum(len(next(samples).logprobs) for _ in range(part.samples))
            member = Member(
                reward=part.reward - penalty(overlong, tokens),
                rewards=MappingProxyType(dict(part.rewards if told_apart else rollout.rewards)),
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


def advantages(
    kind: str,
    groups: Sequence[Sequence[Rollout]],
    own: Own | None = None,
    overlong: OverlongPenaltyConfig | None = None,
    weights: Mapping[str, float] = MappingProxyType({}),
) -> list[list[float]]:
    """Of each sample of each rollout, in order; `own` is what kind = "custom" goes by, `weights` of reward
    functions are what kind = "gdpo" does."""
    members = [members_by_role(group, overlong) for group in groups]
    compared = [role for roles in members for role in roles.values()]
    if kind == "custom":
        assert own is not None, "checked when the run was taken"
        credited = iter(own(compared))
    elif kind == "gdpo":
        credited = iter(credit.gdpo(compared, weights))
    else:
        credited = iter(credit.advantages(kind, [[one.reward for one in role] for role in compared]))
    found: list[list[float]] = []
    for group, roles in zip(groups, members, strict=True):
        of_role = {agent: iter(next(credited)) for agent in roles}
        found += [list(_of_samples(rollout, of_role)) for rollout in group]
    return found


def _of_samples(rollout: Rollout, of_role: dict[str, Iterator[float]]) -> Iterator[float]:
    for part in parts_of(rollout):
        advantage = next(of_role[part.agent])
        yield from [advantage] * part.samples
