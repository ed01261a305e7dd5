"""What the event of a step tells of its groups: fates.py."""

from __future__ import annotations

import pytest
from orch_world import RUN, assert_complete, events
from quartet.run.config import parse_run
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.rollout_pb2 import Rollout, Sample
from quartet_orchestrator import fates
from quartet_orchestrator.outage import RunInterrupted
from quartet_orchestrator.own_advantages import Remembered

DYNAMIC = "[algorithm]\ndynamic_sampling = true\nmax_resample = 20\n[checks]"


def rollout(member: int, reward: float, *, cut: bool = False) -> Rollout:
    sample = Sample(token_ids=[1, 2], logprobs=[-1.0])
    return Rollout(member=member, reward=reward, truncated=cut, samples=[sample])


def told(groups: list[list[Rollout]], more: str) -> list[pb.GroupFate]:
    """With the numbers 10, 11, ..."""
    config = parse_run(
        'model = "m"\nbatch_size = 4\nrollouts_per_example = 2\n[[env]]\nid = "e"\n[algorithm]\n'
        f'advantage = "dr_grpo"\naggregation = "token"\n{more}\n'
    )
    credited = fates.credited(config.algorithm, groups, None)
    return fates.trained(config.algorithm, range(10, 10 + len(groups)), groups, credited)


def test_who_is_left_out_is_told_with_the_reason() -> None:
    groups = [
        [rollout(0, 0.0), rollout(1, 1.0), rollout(2, 1.0, cut=True)],
        [rollout(0, 1.0), rollout(1, 1.0)],
    ]
    both = told(groups, "overlong_filtering = true\nzero_advantage_filtering = true")
    assert both[0] == pb.GroupFate(group=10, members=[0, 1], advantages=[-2 / 3, 1 / 3], overlong=[2])
    assert both[1] == pb.GroupFate(group=11, without_advantage=[0, 1])
    even = [[rollout(0, 0.0), rollout(1, 1.0)], [rollout(0, 1.0, cut=True), rollout(1, 1.0, cut=True)]]
    assert list(told(even, "zero_advantage_filtering = true")[1].without_advantage) == [0, 1]
    neither = told(groups, "")
    assert [list(one.members) for one in neither] == [[0, 1, 2], [0, 1]]
    assert list(neither[1].advantages) == [0.0, 0.0]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_each_part_of_a_batch_is_told(minibatches: int) -> None:
    """As it is sent: in one whose rollouts were all cut they are trained on with 0."""
    groups = [[rollout(0, 0.0), rollout(1, 1.0)], [rollout(0, 0.0, cut=True), rollout(1, 1.0, cut=True)]]
    first, second = told(groups, f"overlong_filtering = true\nnum_minibatches = {minibatches}")
    assert list(first.advantages) == [-0.5, 0.5]
    assert list(second.overlong) == ([] if minibatches == 2 else [0, 1])
    assert list(second.advantages) == ([0.0, 0.0] if minibatches == 2 else [])


def test_of_several_samples_it_is_the_mean_over_their_tokens() -> None:
    both = rollout(0, 0.0)
    both.parts.add(agent="a", reward=1.0, samples=1)
    both.parts.add(agent="b", reward=5.0, samples=1)
    both.samples.add(token_ids=[1, 2, 3, 4], logprobs=[-1.0] * 3)
    config = parse_run('model = "m"\n[[env]]\nid = "e"\n[algorithm]\nadvantage = "none"\n')
    credited = fates.credited(config.algorithm, [[both]], None)
    (fate,) = fates.trained(config.algorithm, [7], [[both]], credited)
    assert list(fate.advantages) == [(1.0 * 1 + 5.0 * 3) / 4]


def test_without_samples_nothing_is_told() -> None:
    bare = rollout(0, 1.0)
    del bare.samples[:]
    assert told([[bare, rollout(1, 0.0)]], "") == []


def test_of_a_function_that_raises_now_nothing_is_told() -> None:
    """fates.py 1: its step is trained, and is told all the same."""

    def refuses(_: object) -> list[list[float]]:
        raise RunInterrupted("it raised")

    config = parse_run(
        'model = "m"\n[[env]]\nid = "e"\n[algorithm]\nadvantage = "custom"\ncustom_advantage = "own"\n'
    )
    groups = [[rollout(0, 0.0), rollout(1, 1.0)]]
    credited = fates.credited(config.algorithm, groups, refuses)
    assert not credited and fates.trained(config.algorithm, [1], groups, credited) == []


def test_an_event_has_room_for_so_many() -> None:
    """fates.py 2"""
    many = [pb.GroupFate(group=1 << 40, discarded="no_spread")] * 100_000
    step = pb.StepEvent(groups=fates.bounded(many))
    assert fates.FATES_BYTES * 0.9 < step.ByteSize() <= fates.FATES_BYTES


def test_a_function_is_asked_once_about_a_batch() -> None:
    """own_advantages.py 2"""
    asked: list[object] = []

    def own(groups: object) -> list[list[float]]:
        asked.append(groups)
        return [[3.0]]

    remembered = Remembered(own)
    assert remembered([["x"]]) == remembered(iter([("x",)])) == [[3.0]] and len(asked) == 1
    remembered([["y"]])
    assert len(asked) == 2


async def test_a_step_tells_what_its_trainer_was_sent_and_what_was_given_up(world) -> None:
    """fates.py 1: from the advantages that came to the trainer, and the ledger."""
    world.host.flat_tasks = set(range(0, 50, 2))
    async with world.orchestrator() as runs:
        toml = world.toml(steps=4, evals=0).replace("[checks]", DYNAMIC)
        await runs.submit(RUN, toml, dry_run=False)
        run = await world.rest(runs)
        assert_complete(world, run)
        seen = await events(runs, rollouts=True)
    steps = [one.step for one in seen if one.WhichOneof("kind") == "step"]
    rollouts = [one.rollout for one in seen if one.WhichOneof("kind") == "rollout"]
    sent = sorted(one for (one,) in world.trainer.advantages)
    groups = [group for step in steps for group in step.groups]
    assert sorted(one for group in groups for one in group.advantages) == sent
    given_up = [group for group in groups if group.discarded]
    assert {group.discarded for group in given_up} == {"no_spread"}
    assert 4 * len(given_up) == run.ledger.discarded["no_spread"] and not any(g.members for g in given_up)
    # Each rollout that ended is of a group of its step.
    known = {(step.step, group.group) for step in steps for group in step.groups}
    assert {(one.step, one.group) for one in rollouts} == known
