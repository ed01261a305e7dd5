"""Rollouts that fail: tried again, replaced, counted; never a reward."""

from __future__ import annotations

import asyncio
import math
import random
import re

import pytest
from orch_world import RUN, assert_complete, events
from quartet.errors import QuartetError
from quartet.run.config import parse_run
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb
from quartet_orchestrator.book import Book
from quartet_orchestrator.failures import Failures
from quartet_orchestrator.own_weights import OwnWeights
from quartet_orchestrator.rollouts import MAX_FAILED_GROUPS
from quartet_orchestrator.sampling import ROLLOUT_BYTES, bounded, checked


async def test_members_that_fail_are_tried_again_alone(world):
    """Invariant 5: retried.

    sampling.py 1, ledger.py 3
    """
    world.host.failures = {(task, 1): 1 for task in range(50)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert_complete(world, run)
    assert not run.ledger.discarded
    again = [r for r in world.host.requests if list(r.members) == [1]]
    assert len(again) == 8
    # SERIES-N/A-..: by which groups are sampled by all replicas in turn, and tried again at another one.
    assert {r.request_id.split("/")[2][:2] for r in again} == {"1-"}


async def test_what_a_host_tried_again_by_itself_is_counted_too(world):
    """Invariant 5: counted."""
    once = world.host._rollout

    def rollout(request, member):
        made = once(request, member)
        made.failed_attempts = member
        return made

    world.host._rollout = rollout
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        assert_complete(world, await world.rest(runs))
        steps = [record.step.metrics for record in await events(runs) if record.WhichOneof("kind") == "step"]
    assert [step["env/toy/failed"] for step in steps] == [2 * (0 + 1 + 2 + 3)] * 4


@pytest.mark.parametrize("kind", [rpb.FAILURE_KIND_SCORER, rpb.FAILURE_KIND_ENVIRONMENT])
async def test_a_judge_that_fails_now_and_then_costs_no_group(world, kind):
    """failures.py 1 and 2: though its host takes that for final."""
    chance, once, seed = random.Random(5), world.host._rollout, 5
    failed = 0

    def rollout(request, member):
        nonlocal failed
        made = once(request, member)
        if chance.random() < 0.1:
            failed += 1
            why = {"kind": kind, "message": f"judge.py:7 in asks: {failed}", "retryable": False}
            made = rpb.Rollout(member=member, failure=why)
        return made

    world.host._rollout = rollout
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
        noted = [record.note for record in await events(runs) if record.WhichOneof("kind") == "note"]
    print(f"seed {seed}: {failed} failed")
    assert_complete(world, run)
    assert failed and not run.ledger.discarded
    told = [note.message for note in noted if "failed as" in note.message]
    assert re.match(r"of \d+ attempts at rollouts of environment 'toy' so far 1 failed as ", told[0])
    assert told[0].endswith("the last with: judge.py:7 in asks: 1")
    assert len(told) == (1 if failed < 10 else 2)


def test_of_failures_somebody_reads_when_they_are_ten_times_as_many():
    """failures.py 2 and 3: also of those that a host tried again by itself."""
    told = []
    replays = [True]
    failures = Failures(lambda message, *, warning: told.append((message, warning)), lambda: replays[0])

    def fail(kind, message="", earlier=0, **more):
        rollout = rpb.Rollout(failure={"kind": kind, "message": message, **more})
        if earlier:
            rollout.failed_attempts = earlier
            rollout.earlier_failure.CopyFrom(rollout.failure)
        failures.ended("a", rollout)

    for number in range(1, 105):
        fail(rpb.FAILURE_KIND_TIMEOUT, f"t{number}")
    assert [text.split("the last with: ")[1] for text, _ in told] == ["t1", "t10", "t100"]
    assert all(warning for _, warning in told)
    del told[:]
    for number in range(1, 6):
        fail(rpb.FAILURE_KIND_HOST, f"worker 7 held 9 GiB ({number})", earlier=2)
    said = "of 116 attempts at rollouts of environment 'a' so far 11 failed as HOST"
    assert told == [(f"{said}, the last with: worker 7 held 9 GiB (4)", True)]
    del told[:]
    for _ in range(200):
        fail(rpb.FAILURE_KIND_CANCELLED)
        fail(rpb.FAILURE_KIND_MODEL, reason="ERROR_REASON_OVERLOADED")
        fail(rpb.FAILURE_KIND_MODEL, reason="ERROR_REASON_VERSION_UNAVAILABLE")
        failures.ended("a", rpb.Rollout())
    assert not told
    replays[0] = False
    for _ in range(10):
        fail(rpb.FAILURE_KIND_MODEL, reason="ERROR_REASON_VERSION_UNAVAILABLE")
    assert "so far 10 failed as MODEL" in told.pop()[0]
    fail(rpb.FAILURE_KIND_SCORER, "its own")
    assert len(told) == 1


async def test_what_a_host_tried_before_is_counted_whatever_becomes_of_its_last_attempt(tmp_path):
    """failures.py 2, with own_weights.py 1 and sampling.py 6."""
    book, told = Book(tmp_path / RUN), []
    own = OwnWeights(
        book,
        parse_run('model = "m"\nmax_steps = 1\n[[env]]\nid = "a"'),
        lambda version: _raises("VERSION_UNKNOWN"),
    )
    failures = Failures(lambda message, *, warning: told.append(message))
    earlier = rpb.RolloutFailure(kind=rpb.FAILURE_KIND_TIMEOUT, message="slow")
    strange, large = (rpb.Rollout(failed_attempts=2, earlier_failure=earlier, reward=1.0) for _ in range(2))
    strange.weights.add(policy_version=9, weights_id=7)
    large.samples.add(token_ids=[1 << 20] * (ROLLOUT_BYTES // 3))
    await own.judge(strange)
    bounded(large)
    kinds = []
    for rollout in (strange, large):
        kinds.append(rollout.failure.kind)
        failures.ended("a", rollout)
        assert rollout.earlier_failure == earlier and not rollout.samples and not rollout.reward
    assert kinds == [rpb.FAILURE_KIND_MODEL, rpb.FAILURE_KIND_HOST]
    assert [text.partition(" failed as ")[2] for text in told] == ["TIMEOUT, the last with: slow"]
    book.close()


async def _raises(reason):
    raise QuartetError(reason, "of the test")


async def test_a_group_that_fails_for_good_is_replaced_and_counted(world):
    """Invariant 5: excluded whole, and counted; never reward 0.

    rollouts.py 3, credit.py 1
    """
    world.host.failing_tasks = set(range(0, 50, 3))
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert_complete(world, run)
    assert set(run.ledger.discarded) == {"failed:ENVIRONMENT"}
    assert not any(tokens[0] % 3 == 0 for tokens in world.trainer.disk[RUN, "final"].trained)


@pytest.mark.parametrize(
    "kind",
    [
        rpb.FAILURE_KIND_ENVIRONMENT,
        rpb.FAILURE_KIND_SCORER,
        rpb.FAILURE_KIND_HOST,
        rpb.FAILURE_KIND_TIMEOUT,
    ],
)
async def test_a_broken_environment_stops_the_run_resumable(world, kind):
    """rollouts.py 7"""
    world.host.failing_tasks, world.host.kind = set(range(50)), kind
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_STOPPED
        assert run.ledger.dispatched == sum(run.ledger.discarded.values()) + run.ledger.in_flight
        # One that ends between others joins two rows.
        assert re.match(r"1[0-9] groups in a row of environment 'toy' ended with nothing", run.error)
        assert "broken" in run.error and "resume" in run.error
        world.host.failing_tasks = set()
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs))


@pytest.mark.parametrize(("flat", "steps"), [(False, 8), (True, 1)])
async def test_failures_with_complete_groups_between_them_stop_no_run(world, flat, steps):
    """rollouts.py 7: also where what was complete taught too little."""
    world.host.failing_tasks = set(range(0, 50, 2))
    toml = world.toml(steps=steps, evals=0)
    if flat:
        world.host.flat_tasks = set(range(1, 50, 2))
        toml = toml.replace("[checks]", '[algorithm]\npreset = "dapo"\n[checks]')
    async with world.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        run = await world.rest(runs)
    assert_complete(world, run, steps=steps)
    assert run.ledger.discarded["failed:ENVIRONMENT"] > 4 * MAX_FAILED_GROUPS


async def test_groups_that_are_cancelled_are_sampled_afresh_and_count_as_nothing(world):
    """rollouts.py 7: an operator's Cancel of all that is under way."""
    world.host.failing_tasks, world.host.kind = set(range(50)), rpb.FAILURE_KIND_CANCELLED
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(evals=0), dry_run=False)
        book = runs.get(RUN)
        async with asyncio.timeout(60):
            while book.state.ledger.discarded["failed:CANCELLED"] < 4 * 15:
                await book.changed()
        world.host.failing_tasks = set()
        run = await world.rest(runs)
    assert_complete(world, run)
    assert set(run.ledger.discarded) == {"failed:CANCELLED"}


async def test_streams_that_break_are_finished_elsewhere(world):
    world.host.break_streams = 5
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        assert_complete(world, await world.rest(runs))
    sizes = [len(r.members) for r in world.host.requests if r.split == epb.SPLIT_TRAIN]
    assert sum(size < 4 for size in sizes) == 5


async def test_rollouts_without_a_sampled_token_are_no_outage(world):
    """An environment that never asks the model is at fault itself: its groups fail, the run says why."""
    world.host.silent = True
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(evals=0), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_STOPPED
    assert "failed:ENVIRONMENT" in run.error and "no token was sampled" in run.error


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_a_failure(reward):
    """sampling.py 5 and invariant 5."""
    rollout = rpb.Rollout(reward=reward)
    rollout.samples.add(token_ids=[1], logprobs=[-1.0]).spans.add(length=1)
    checked(rollout)
    assert rollout.failure.kind == rpb.FAILURE_KIND_SCORER and rollout.reward == 0


@pytest.mark.parametrize("reward", [math.nan, -math.inf, 1e39])
def test_a_named_reward_that_is_no_number_is_a_failure(reward):
    """sampling.py 5: gdpo goes by these, whatever their weight."""
    rollout = rpb.Rollout(reward=1.0, rewards={"match": 1.0, "style": reward})
    rollout.samples.add(token_ids=[1, 2], logprobs=[-1.0]).spans.add(start=1, length=1)
    checked(rollout)
    assert rollout.failure.kind == rpb.FAILURE_KIND_SCORER and not rollout.rewards
    assert f"a reward is {reward}" in rollout.failure.message


async def test_a_sample_that_no_trainer_takes_is_sampled_again_and_ends_no_run(world):
    """sampling.py 5: of a host that is not ours."""
    made, told = world.host._rollout, 0

    def one_is_bad(request, member):
        nonlocal told
        rollout = made(request, member)
        told += 1
        if told == 5:
            rollout.samples[0].logprobs[0] = -math.inf
        return rollout

    world.host._rollout = one_is_bad
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(evals=0), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_COMPLETED, run.error


@pytest.mark.parametrize("lengths", [(), (1,), (1, 2)])
def test_a_token_that_no_version_is_told_of_is_a_failure(lengths):
    """sampling.py 5 and invariant 4: nobody knows how stale it is."""
    rollout = rpb.Rollout(reward=1.0)
    for spans in ((2,), lengths):
        sample = rollout.samples.add(token_ids=[1, 2, 3, 4], logprobs=[-1.0, -1.0])
        for start, length in enumerate(spans, 1):
            sample.spans.add(start=start, length=length)
    checked(rollout)
    assert rollout.failure.kind == rpb.FAILURE_KIND_HOST and rollout.failure.retryable and not rollout.reward


@pytest.mark.parametrize("failed", [True, False])
@pytest.mark.parametrize("said", ["", "x", "[]", '{"answer":"42"}', '{"answer":"' + "x" * 5000 + '"}'])
def test_only_what_can_be_written_down_is_told_of_a_task(said, failed):
    rollout = rpb.Rollout(task_json=said)
    if failed:
        rollout.failure.kind = rpb.FAILURE_KIND_SCORER
    checked(rollout)
    assert rollout.task_json == (said if said == '{"answer":"42"}' else "")


@pytest.mark.parametrize("failed", [True, False])
def test_a_metric_that_is_no_finite_number_is_left_out(failed):
    """sampling.py 5: of a host that is not ours; what followers write down is JSON."""
    rollout = rpb.Rollout(reward=0.5, metrics={"a": math.nan, "b": math.inf, "c": -math.inf, "d": 2.0})
    rollout.samples.add(token_ids=[1, 2], logprobs=[-1.0]).spans.add(start=1, length=1)
    if failed:
        rollout.failure.kind = rpb.FAILURE_KIND_SCORER
    checked(rollout)
    assert dict(rollout.metrics) == {"d": 2.0} and rollout.HasField("failure") == failed


@pytest.mark.parametrize("by_host", [True, False])
def test_a_failure_never_has_a_reward(by_host):
    """sampling.py 5 and invariant 5: also one that comes from the host with some of them."""
    rollout = rpb.Rollout(reward=0.5, rewards={"match": 1.0}, metrics={"length": 2.0})
    rollout.samples.add(token_ids=[1], logprobs=[-1.0]).spans.add(length=1)
    rollout.parts.add(agent="a", reward=1.0, samples=1)
    rollout.parts.add(agent="b", reward=0.0, samples=0 if by_host else 1)
    if by_host:
        rollout.failure.kind = rpb.FAILURE_KIND_SCORER
    checked(rollout)
    assert rollout.HasField("failure") and not rollout.reward and not rollout.rewards
    assert [(part.agent, part.reward) for part in rollout.parts] == [("a", 0.0), ("b", 0.0)]
    assert rollout.samples and rollout.metrics, "what happened stays for whoever looks into it"


async def test_after_a_restart_a_group_misses_only_its_missing_members(world):
    """rollouts.py 1 and 2: nothing that was written down is sampled again."""
    world.host.max_delay_s = 0.2
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(evals=0), dry_run=False)
        book = runs.get(RUN)
        while not any(group.done for group in book.state.groups.values()):
            await book.changed()
    world.host.requests.clear()
    world.host.max_delay_s = 0.004
    async with world.orchestrator() as runs:
        groups = dict(runs.get(RUN).state.groups)
        had = {number: set(group.done) for number, group in groups.items()}
        assert any(had.values())
        assert_complete(world, await world.rest(runs))
    for number, done in had.items():
        (request,) = [r for r in world.host.requests if r.request_id.startswith(f"{RUN}/group-{number}/")]
        assert set(request.members) == set(range(4)) - done
