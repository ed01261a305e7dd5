"""The difficulty filter: which groups it takes out, and that a run with it loses and doubles nothing."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import reduce
from operator import add
from statistics import fmean, pvariance

import pytest
from orch_world import RUN, assert_complete, events
from quartet.run.difficulty import DifficultyFilterConfig
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator.difficulty import LOW_VARIANCE, NO_SPREAD, TOO_EASY, TOO_HARD, verdict
from quartet_orchestrator.state import RESTING

GROUP = 4
BOUNDS = DifficultyFilterConfig(enabled=True, min_reward_variance=0.1, min_reward=0.05, max_reward=0.95)
TABLE = """[difficulty_filter]
enabled = true
min_reward_variance = {variance}
min_reward = {least}
max_reward = {most}
max_resample = {again}
[checks]"""


def filtered(world, steps=4, variance=0.0, least=-1.0, most=2.0, again=20):
    table = TABLE.format(variance=variance, least=least, most=most, again=again)
    return world.toml(steps=steps, evals=0).replace("[checks]", table)


def trained_groups(world):
    """The rewards of each group of every batch that was trained, as the fake host gives them."""
    rewards = [
        1.0 if task in world.host.flat_tasks else ((task * 7 + member * 13 + version) % 10) / 10
        for task, member, version, _ in world.trainer.disk[RUN, "final"].trained
    ]
    return [rewards[first : first + GROUP] for first in range(0, len(rewards), GROUP)]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0] * 8, TOO_EASY),
        ([1.0] * 7 + [0.7], TOO_EASY),
        ([0.0] * 8, TOO_HARD),
        ([0.0] * 7 + [0.3], TOO_HARD),
        ([0.5] * 8, NO_SPREAD),
        ([0.4] * 4 + [0.6] * 4, LOW_VARIANCE),
        # 7/64 = 0.109: the least that a group of eight can have and differ by a whole reward.
        ([0.0] * 7 + [1.0], None),
        ([0.0, 1.0], None),
    ],
)
def test_a_group_is_judged_by_its_mean_and_its_variance(rewards, reason) -> None:
    """difficulty.py 1."""
    assert verdict(BOUNDS, rewards, [rewards]) == reason
    off = DifficultyFilterConfig(enabled=False, min_reward_variance=0.1, min_reward=0.05, max_reward=0.95)
    assert verdict(off, rewards, [rewards]) == (NO_SPREAD if len(set(rewards)) == 1 else None)


def test_where_nothing_is_compared_rewards_may_be_alike() -> None:
    """A rollout alone has no spread, and learns from its reward all the same."""
    assert verdict(BOUNDS, [0.5], [[0.5]], needs_spread=False) is None
    assert verdict(BOUNDS, [0.99], [[0.99]], needs_spread=False) == TOO_EASY
    for alike_or_nearly in ([0.5, 0.5], [0.5, 0.51]):
        assert verdict(BOUNDS, alike_or_nearly, [alike_or_nearly], needs_spread=False) is None


def test_what_is_alone_in_its_role_differs_from_nothing() -> None:
    """difficulty.py 1: an advantage of one's own may be of a rollout by itself."""
    assert verdict(BOUNDS, [0.5], [[0.5]]) is None
    assert verdict(BOUNDS, [0.5], [[0.4], [0.6]]) is None
    assert verdict(BOUNDS, [0.99], [[0.99]]) == TOO_EASY
    assert verdict(BOUNDS, [0.5], [[0.4], [0.6, 0.6]]) == NO_SPREAD, "siblings in one episode"


async def test_a_filter_of_single_rollouts_takes_out_those_that_are_out_of_bounds_alone(world):
    async with world.orchestrator() as runs:
        alone = filtered(world, least=0.3, most=0.7).replace("batch_size = 8", "batch_size = 2")
        alone = alone.replace("rollouts_per_example = 4", "rollouts_per_example = 1")
        assert "rollouts_per_example = 1\n" in alone
        await runs.submit(RUN, alone + '\n[algorithm]\nadvantage = "none"\n', dry_run=False)
        run = await world.rest(runs)
    rewards = [
        ((task * 7 + member * 13 + version) % 10) / 10
        for task, member, version, _ in world.trainer.disk[RUN, "final"].trained
    ]
    assert rewards and all(0.3 <= reward <= 0.7 for reward in rewards)
    assert set(run.ledger.discarded) == {TOO_EASY, TOO_HARD}


def test_the_order_in_which_rollouts_end_changes_nothing() -> None:
    """difficulty.py 2: at a bound to the last bit, sums in another order would give another verdict."""
    rewards = [0.1, 0.2, 0.3, 0.7, 0.6]
    exactly = DifficultyFilterConfig(
        enabled=True, min_reward_variance=pvariance(rewards), min_reward=fmean(rewards)
    )
    verdicts = {verdict(exactly, order, [order]) for order in itertools.permutations(rewards)}
    assert verdicts == {None}
    most = DifficultyFilterConfig(enabled=True, max_reward=fmean(rewards))
    assert verdict(most, rewards, [rewards]) is None
    assert len({reduce(add, order) for order in itertools.permutations(rewards)}) > 1, "plain sums differ"


def test_of_several_roles_the_one_that_differs_most_counts() -> None:
    rewards = [0.5, 0.5]
    assert verdict(BOUNDS, rewards, [[0.5, 0.5], [0.0, 1.0]]) is None
    assert verdict(BOUNDS, rewards, [[0.5, 0.5], [0.4, 0.6]]) == LOW_VARIANCE


async def test_what_is_too_easy_or_too_hard_is_replaced_and_counted(world):
    """Invariant 1: each of its rollouts is in the ledger, under its reason."""
    world.host.flat_tasks = set(range(0, 50, 2))
    async with world.orchestrator() as runs:
        await runs.submit(RUN, filtered(world, least=0.42, most=0.95), dry_run=False)
        run = await world.rest(runs)
        assert_complete(world, run)
        steps = [record.step.metrics for record in await events(runs) if record.WhichOneof("kind") == "step"]
    assert all(0.42 <= fmean(group) <= 0.95 for group in trained_groups(world))
    assert set(run.ledger.discarded) == {TOO_EASY, TOO_HARD}
    assert sum(run.ledger.discarded.values()) == GROUP * sum(step["rollout/resampled"] for step in steps)


async def test_rewards_that_hardly_differ_are_replaced(world):
    wanted = 0.07
    async with world.orchestrator() as runs:
        await runs.submit(RUN, filtered(world, variance=wanted), dry_run=False)
        run = await world.rest(runs)
    assert_complete(world, run)
    assert all(pvariance(group) >= wanted for group in trained_groups(world))
    assert set(run.ledger.discarded) == {LOW_VARIANCE}


async def test_the_bound_on_replacements_holds_over_restarts(world):
    """Invariants 1 and 9, rollouts.py 5."""
    world.host.flat_tasks = set(range(50))
    world.trainer.delay_s = 0.01
    run, restarts = pb.Run(), 0
    while run.phase not in RESTING:
        async with world.orchestrator() as runs:
            run = await runs.submit(RUN, filtered(world, steps=6, most=0.95, again=3), dry_run=False)
            with suppress(TimeoutError):
                run = await world.rest(runs, timeout_s=0.07 * (1 + restarts / 10))
            restarts += run.phase not in RESTING
    assert restarts >= 2
    assert_complete(world, run, steps=6)
    assert run.ledger.discarded == {TOO_EASY: GROUP * 2 * 6 * 3}
