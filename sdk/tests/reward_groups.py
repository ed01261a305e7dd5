"""A group of two completions, and what reward functions say of it."""

from __future__ import annotations

from typing import Any

from quartet.rewards.functions import Failed, Group, RewardFunctions, Scores

GROUP = Group(
    prompts=["p", "p"],
    completions=["a", "bb"],
    completion_ids=[[1], [2, 2]],
    columns={"answer": ["x", "x"], "trainer_state": ["a column of that name", "loses"]},
)


SECONDS = 60.0


def constant(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


async def scores(functions: Any, group: Group = GROUP, **settings: Any) -> Scores:
    found = await RewardFunctions(functions, **settings).score(group)
    assert isinstance(found, Scores), found
    return found


async def failed(function: Any, group: Group = GROUP) -> Failed:
    found = await RewardFunctions(function).score(group)
    assert isinstance(found, Failed), found
    return found
