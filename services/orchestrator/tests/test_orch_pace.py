"""The staleness bound of docs/staleness.md, as a property of random schedules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet_orchestrator.pace import Pace, Place


@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 8), st.integers(0, 2**32), st.booleans())
def test_bound_holds_for_every_order_of_completion_failure_lag_and_restart(
    bound, groups, steps, seed, restarts
):
    """Invariant 4: replicas lag, rollouts end in any order, groups fail, the orchestrator restarts, and
    always s - v <= K.

    pace.py 1-4
    """

    def new_pace(published: int) -> Pace:
        return Pace(max_off_policy_steps=bound, groups_per_batch=groups, max_steps=steps, published=published)

    chance = random.Random(seed)
    pace, published, replica = new_pace(0), 0, 0
    running: list[Place] = []
    complete: dict[int, int] = {}
    held: set[Place] = set()
    trained_lags = []
    for _ in range(10_000):
        if published == steps:
            break
        while chance.random() < 0.8 and (place := pace.take()) is not None:
            assert place not in held
            held.add(place)
            running.append(place)
        assert {place.batch for place in held} <= set(range(published, published + bound + 1))
        if chance.random() < 0.3:
            replica = min(published, replica + 1)
        if running and chance.random() < 0.7:
            place = running.pop(chance.randrange(len(running)))
            if chance.random() < 0.2:
                held.discard(place)
                pace.give_back(place)
            elif replica < pace.min_policy_version(place.batch):
                running.append(place)  # the engine makes it wait
            else:
                # Its tokens: any versions from the one that it waited for to the newest one a replica has.
                versions = [chance.randint(pace.min_policy_version(place.batch), replica) for _ in range(3)]
                assert pace.violation(place.batch, versions) is None
                trained_lags += [place.batch - version for version in versions]
                complete[place.batch] = complete.get(place.batch, 0) + 1
        if complete.get(published) == groups:
            held = {place for place in held if place.batch != published}
            published += 1
            pace.publish(published)
        if restarts and chance.random() < 0.05:
            pace = new_pace(published)
            pace.restore(held)
    assert published == steps, "the schedule did not end: a place was lost"
    assert all(0 <= lag <= bound for lag in trained_lags)


def test_zero_is_strictly_alternating():
    pace = Pace(max_off_policy_steps=0, groups_per_batch=2, max_steps=2)
    assert [pace.take(), pace.take(), pace.take()] == [Place(0, 0), Place(0, 1), None]
    pace.publish(1)
    assert [pace.take(), pace.take(), pace.take()] == [Place(1, 0), Place(1, 1), None]
    pace.publish(2)
    assert pace.take() is None


def test_one_batch_ahead():
    pace = Pace(max_off_policy_steps=1, groups_per_batch=1, max_steps=9)
    assert [pace.take(), pace.take(), pace.take()] == [Place(0, 0), Place(1, 0), None]
    pace.give_back(Place(0, 0))
    assert pace.take() == Place(0, 0)


@pytest.mark.parametrize(
    ("versions", "reason"), [([3, 4, 5], None), ([2], "stale"), ([6], "version_unpublished"), ([], None)]
)
def test_violations_are_named(versions, reason):
    """pace.py 5"""
    pace = Pace(max_off_policy_steps=2, groups_per_batch=1, max_steps=9)
    assert pace.violation(5, versions) == reason


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ([9, 12, 15], None),
        ([8], "stale"),
        ([13], "version_unpublished"),  # between two steps nothing is published
        ([6], "stale"),
        ([18], "version_unpublished"),
        ([12, 7], "stale"),
    ],
)
def test_a_step_of_several_versions_is_counted_as_one(versions, reason):
    """pace.py 2 and 5: batch 5 of three optimizer steps each, at most two steps behind."""
    pace = Pace(max_off_policy_steps=2, groups_per_batch=1, max_steps=9, versions_per_step=3)
    assert pace.min_policy_version(5) == 9 and pace.min_policy_version(1) == 0
    assert pace.violation(5, versions) == reason


def test_restore_frees_the_places_that_nobody_holds():
    pace = Pace(max_off_policy_steps=1, groups_per_batch=3, max_steps=9, published=4)
    pace.restore([Place(4, 0), Place(5, 1)])
    taken = [pace.take() for _ in range(5)]
    assert taken == [Place(4, 1), Place(4, 2), Place(5, 0), Place(5, 2), None]
