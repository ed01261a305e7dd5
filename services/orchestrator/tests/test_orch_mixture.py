"""Several environments in one run: their shares of what is trained, whatever becomes of their groups."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orch_world import RUN, assert_complete, events
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator.mixture import Mixture
from quartet_orchestrator.rollouts import MAX_FAILED_GROUPS
from quartet_orchestrator.state import RESTING

THREE = """
[[env]]
id = "often"
weight = 6
[[env]]
id = "seldom"
weight = 1
[[env]]
id = "toy"
weight = 3
"""
TWICE = """
[[env]]
id = "toy"
name = "easy"
args = { digits = 1 }
[[env]]
id = "toy"
name = "hard"
args = { digits = 9 }
"""


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=7))
def test_every_prefix_has_the_shares_to_within_less_than_one_place(weights):
    """mixture.py 2, with the bound of the paper, exactly."""
    mixture, counts = Mixture(weights), Counter()
    total = sum(map(Fraction, weights))
    bound = 1 - Fraction(1, max(2, 2 * len(weights) - 2))
    for places in range(1, 150):
        counts[mixture.environment(places - 1)] += 1
        for number, weight in enumerate(weights):
            assert abs(counts[number] - Fraction(weight) / total * places) <= bound


async def test_the_places_that_a_run_had_are_counted_off_the_loop(world, monkeypatch):
    """They may be a million, and other runs live on it."""
    plain, counted = Mixture.environment, []

    def environment(mixture, place):
        before = len(mixture._order)
        found = plain(mixture, place)
        counted.append((len(mixture._order) - before, threading.current_thread() is threading.main_thread()))
        return found

    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        while runs.get(RUN).state.step < 3:
            await runs.get(RUN).changed()
    monkeypatch.setattr(Mixture, "environment", environment)
    async with world.orchestrator() as runs:
        assert_complete(world, await world.rest(runs), steps=6)
    assert all(places <= 8 for places, on_the_loop in counted if on_the_loop)
    assert counted[0] == (max(places for places, _ in counted), False)


def test_the_mixture_follows_from_the_place_alone():
    """mixture.py 1"""
    weights = [0.5, 0.2, 0.3]
    forward, backward = Mixture(weights), Mixture(weights)
    places = [forward.environment(place) for place in range(100)]
    assert [backward.environment(place) for place in reversed(range(100))] == places[::-1]
    assert Counter(places) == {0: 50, 1: 20, 2: 30}


def mixed(world, steps, **more):
    return world.toml(steps=steps, **more).replace('[[env]]\nid = "toy"', THREE)


async def test_what_is_trained_has_the_shares_and_is_reported_apart(world):
    """mixture.py 1: one environment fails two groups of three, and gets no less of the run than it should.

    rollouts.py 4
    """
    world.host.failing_tasks = set(range(50)) - set(range(0, 50, 3))
    world.host.failing_environments = {"seldom"}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, mixed(world, 20), dry_run=False)
        run = await world.rest(runs)
        assert_complete(world, run, steps=20)
        steps = [record.step.metrics for record in await events(runs) if record.WhichOneof("kind") == "step"]
    weights = {"often": 6, "seldom": 1, "toy": 3}
    for env_id, weight in weights.items():
        share = sum(step[f"env/{env_id}/share"] for step in steps) / 20
        assert share == pytest.approx(weight / 10, abs=0.02)
        assert any(f"env/{env_id}/reward" in step for step in steps)
    failed = {
        env_id: sum(step[f"env/{env_id}/failed"] for step in steps if f"env/{env_id}/failed" in step)
        for env_id in weights
    }
    assert failed["seldom"] > 0 and failed["often"] == failed["toy"] == 0
    assert sum(step["rollout/failed"] for step in steps) == failed["seldom"]
    assert run.ledger.discarded == {"failed:ENVIRONMENT": sum(run.ledger.discarded.values())}


async def test_the_shares_survive_restarts(world):
    world.trainer.delay_s = 0.01
    run = pb.Run()
    restarts = 0
    while run.phase not in RESTING:
        async with world.orchestrator() as runs:
            run = await runs.submit(RUN, mixed(world, 15), dry_run=False)
            with suppress(TimeoutError):
                run = await world.rest(runs, timeout_s=0.1 * (1 + restarts / 10))
            restarts += run.phase not in RESTING
            dispatched = runs.get(RUN).journal.select("dispatched")
    assert_complete(world, run, steps=15)
    assert restarts >= 2
    places = {(r.dispatched.batch, r.dispatched.place): r.dispatched.environment for r in dispatched}
    assert Counter(places.values()) == {0: 18, 1: 3, 2: 9}
    # A task comes again only when all of its environment have come.
    assert len({(r.dispatched.environment, r.dispatched.task_index) for r in dispatched}) == len(dispatched)


async def test_one_broken_environment_of_several_ends_the_run_and_is_named(world):
    """rollouts.py 7: the others' complete groups do not hide it."""
    world.host.failing_tasks = set(range(50))
    world.host.failing_environments = {"seldom"}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, mixed(world, 20), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_STOPPED
    assert f"{MAX_FAILED_GROUPS} groups in a row of environment 'seldom' ended" in run.error


async def test_one_environment_twice_is_two_environments_with_names(world):
    toml = "messages_of_members = 3\n" + world.toml(steps=6).replace('[[env]]\nid = "toy"', TWICE)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        run = await world.rest(runs)
        assert_complete(world, run, steps=6)
        ended = runs.get(RUN).journal.select("rollout")
        steps = [record.step.metrics for record in await events(runs) if record.WhichOneof("kind") == "step"]
    assert all(step["env/easy/share"] + step["env/hard/share"] == pytest.approx(1) for step in steps)
    assert {record.rollout.env_id for record in ended} == {"easy", "hard"}
    asked = {(one.environment.id, one.environment.args_json) for one in world.host.requests}
    assert asked == {("toy", '{"digits": 1}'), ("toy", '{"digits": 9}')}
    trained = [one for one in world.host.requests if one.split == epb.SPLIT_TRAIN]
    assert {one.messages_of_members for one in trained} == {3}
