"""Groups whose rewards compare their members: whatever happens, what is trained was scored as one group."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from contextlib import suppress

import pytest
from orch_world import RUN, assert_complete
from quartet.run.evaluation import EvalTrial
from quartet.run.hosted import HostedConfig
from quartet.run.sampling import EvalSamplingConfig
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb
from quartet_orchestrator import outage
from quartet_orchestrator.book import Book
from quartet_orchestrator.eval_metrics import Outcome
from quartet_orchestrator.rollouts import MAX_FAILED_GROUPS
from quartet_orchestrator.state import RESTING

GROUP = 4


@pytest.fixture
def compared(world):
    """The world, with an environment that scores groups together."""
    world.host.compares = True
    return world


def assert_trained_whole(world):
    """Each group that was trained is of one request for all its members. (A task comes once here.)"""
    groups = defaultdict(list)
    for task, member, _, number in world.trainer.disk[RUN, "final"].trained:
        groups[task].append((member, number))
    for task, members in groups.items():
        assert sorted(member for member, _ in members) == list(range(GROUP)), task
        assert len({number for _, number in members}) == 1, (
            f"task {task} was put together of several scorings"
        )


def assert_asked_whole(world):
    assert {len(request.members) for request in world.host.requests} == {GROUP}


@pytest.mark.parametrize("seed", range(3))
async def test_a_stream_that_breaks_is_asked_again_for_all_of_its_group(compared, seed, monkeypatch):
    """Invariants 1 and 2, and sampling.py 4: kills of the orchestrator and broken streams, at random."""
    print(f"seed {seed}")
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.05)
    chance = random.Random(seed)
    compared.host.random.seed(seed)
    compared.trainer.delay_s = 0.01
    run, kills = pb.Run(), 0
    while run.phase not in RESTING:
        compared.host.break_streams = chance.randrange(4)
        async with compared.orchestrator() as runs:
            run = await runs.submit(RUN, compared.toml(evals=0), dry_run=False)
            with suppress(TimeoutError):
                run = await compared.rest(runs, timeout_s=chance.uniform(0.05, 0.3) * (1 + kills / 10))
            kills += run.phase not in RESTING
    assert kills
    assert_complete(compared, run)
    assert not run.ledger.discarded, "what was held back was never written down"
    assert_asked_whole(compared)
    assert_trained_whole(compared)


async def test_a_member_that_fails_has_its_whole_group_asked_again(compared):
    """sampling.py 4 and invariant 5."""
    compared.host.failures = {(task, task % GROUP): task % 3 for task in range(50)}
    async with compared.orchestrator() as runs:
        await runs.submit(RUN, compared.toml(evals=0), dry_run=False)
        run = await compared.rest(runs)
    assert_complete(compared, run)
    assert_asked_whole(compared)
    assert_trained_whole(compared)
    assert not run.ledger.discarded


async def test_a_group_of_which_a_kill_left_a_part_is_replaced(compared, monkeypatch):
    """rollouts.py 2, invariants 1 and 9: as many as would fail a run whose environment is broken."""
    compared.host.max_delay_s = 1e6  # nothing ends before the kill
    groups = MAX_FAILED_GROUPS + 2
    # No more than one batch is asked for: what is under way is complete, and nothing arrives after the kill.
    toml = compared.toml(evals=0, off_policy=0).replace("batch_size = 8", f"batch_size = {groups * GROUP}")
    async with compared.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        while len(compared.host.requests) < groups:  # noqa: ASYNC110 - the host's side of it
            await asyncio.sleep(0.01)
    book = Book(compared.folder / "runs" / RUN)
    torn = sorted(book.state.groups)
    assert len(torn) == len(compared.host.requests) == groups
    for number in torn:
        rollout = rpb.Rollout(member=2, reward=1.0)
        rollout.samples.add(token_ids=[7, 7, 7, 7], logprobs=[-1.0] * 2).spans.add(start=2, length=2)
        book.write(rollout=pb.RolloutEvent(group=number, task_index=0, step=1, rollout=rollout))
    book.close()
    compared.host.max_delay_s = 0.0
    compared.host.requests.clear()
    async with compared.orchestrator() as runs:
        run = await compared.rest(runs)
        state = runs.get(RUN).state
    assert run.phase == pb.RUN_PHASE_COMPLETED, run.error
    assert run.ledger.discarded == {"torn": GROUP * len(torn)} and run.ledger.in_flight == 0
    assert run.ledger.dispatched == run.ledger.trained + GROUP * len(torn)
    again = {request.request_id.split("/")[1] for request in compared.host.requests}
    assert not again & {f"group-{number}" for number in torn} and not state.groups
    trained = compared.trainer.disk[RUN, "final"].trained
    assert (7, 7, 7, 7) not in trained and len(trained) == run.ledger.trained
    assert_asked_whole(compared)


def test_of_a_group_that_is_measured_again_the_last_attempts_count():
    """eval_metrics.py 1"""
    outcome = Outcome(EvalTrial("toy", HostedConfig(id="toy"), 1, 3, EvalSamplingConfig()), 1, compares=True)
    for member in (0, 1):
        outcome.ended(0, rpb.Rollout(member=member, reward=9.0))
    assert outcome.missing(0) == [0, 1, 2], "a kill left a part"
    outcome.ended(0, rpb.Rollout(member=1, failure={"kind": "FAILURE_KIND_TOOL"}))
    for member in (0, 2):
        outcome.ended(0, rpb.Rollout(member=member, reward=1.0))
    assert {member: result.reward for (_, member), result in outcome.good.items()} == {0: 1.0, 2: 1.0}
    assert outcome.losses() == {"TOOL": 1} and outcome.missing(0) == [0, 1, 2]


async def test_an_evaluation_is_measured_in_whole_groups_too(compared):
    """measuring.py 1: over a restart, and where a member failed for a while."""
    toml = compared.toml(evals=3).replace(
        "num_examples = 3", f"num_examples = 3\nrollouts_per_example = {GROUP}"
    )
    compared.host.break_streams = 4
    async with compared.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        book = runs.get(RUN)
        while not list(book.journal.select("eval_rollout", step=0)):
            await book.changed()
    async with compared.orchestrator() as runs:
        run = await compared.rest(runs)
        events = list(runs.get(RUN).journal.select("eval_rollout", step=0))
    assert_complete(compared, run)
    asked = [request for request in compared.host.requests if request.split == epb.SPLIT_EVAL]
    assert {len(request.members) for request in asked} == {GROUP}
    scored = defaultdict(set)
    for event in events:
        rollout = event.eval_rollout.rollout
        scored[rollout.task_index].add(rollout.rollout.samples[0].token_ids[3])
    assert [len(requests) for requests in scored.values()] == [1] * 3, "none was scored twice"
