"""Dynamic sampling: groups whose rewards are all alike are replaced, within a bound, and accounted for."""

from __future__ import annotations

from contextlib import suppress

import pytest
from orch_world import RUN, assert_complete, events
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator.state import RESTING

ALGORITHM = "[algorithm]\ndynamic_sampling = true\nmax_resample = {}\n[checks]"


def dynamic(world, steps=4, max_resample=3):
    return world.toml(steps=steps, evals=0).replace("[checks]", ALGORITHM.format(max_resample))


def trained_tasks(world):
    return [tokens[0] for tokens in world.trainer.disk[RUN, "final"].trained]


async def test_groups_that_teach_nothing_are_replaced_and_counted(world):
    """Invariant 1: each of their rollouts is in the ledger, under its reason."""
    world.host.flat_tasks = set(range(0, 50, 2))
    async with world.orchestrator() as runs:
        await runs.submit(RUN, dynamic(world, max_resample=20), dry_run=False)
        run = await world.rest(runs)
        assert_complete(world, run)
        steps = [record.step.metrics for record in await events(runs) if record.WhichOneof("kind") == "step"]
    assert not any(task % 2 == 0 for task in trained_tasks(world))
    assert set(run.ledger.discarded) == {"no_spread"}
    assert run.ledger.discarded["no_spread"] == 4 * sum(step["rollout/resampled"] for step in steps)
    assert all(step["env/toy/no_spread"] == 0 for step in steps)
    assert any(step["rollout/reward"] != step["train/reward"] for step in steps)


async def test_a_place_is_sampled_again_so_often_and_no_more(world):
    """rollouts.py 5: a policy that has learned everything, or nothing, still gets full batches."""
    world.host.flat_tasks = set(range(50))
    async with world.orchestrator() as runs:
        await runs.submit(RUN, dynamic(world), dry_run=False)
        run = await world.rest(runs)
        steps = [record.step.metrics for record in await events(runs) if record.WhichOneof("kind") == "step"]
    assert_complete(world, run)
    assert run.ledger.discarded == {"no_spread": 4 * 8 * 3}
    assert all(step["rollout/resampled"] == 2 * 3 and step["env/toy/no_spread"] == 1 for step in steps)


async def test_the_bound_holds_over_restarts(world):
    """Invariants 1 and 9."""
    world.host.flat_tasks = set(range(50))
    world.trainer.delay_s = 0.01
    run, restarts = pb.Run(), 0
    while run.phase not in RESTING:
        async with world.orchestrator() as runs:
            run = await runs.submit(RUN, dynamic(world, steps=6), dry_run=False)
            with suppress(TimeoutError):
                run = await world.rest(runs, timeout_s=0.07 * (1 + restarts / 10))
            restarts += run.phase not in RESTING
    assert restarts >= 2
    assert_complete(world, run, steps=6)
    assert run.ledger.discarded == {"no_spread": 6 * 8 * 3}


@pytest.mark.parametrize("text", ["", "[algorithm]\noverlong_filtering = true\n"])
async def test_without_it_every_complete_group_is_trained(world, text):
    world.host.flat_tasks = set(range(50))
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(evals=0) + "\n" + text, dry_run=False)
        run = await world.rest(runs)
    assert_complete(world, run)
    assert not run.ledger.discarded
