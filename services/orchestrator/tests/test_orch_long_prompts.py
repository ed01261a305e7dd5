"""Tasks whose prompts are too long: none is trained on, none is sampled twice, and every batch gets full."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress

import pytest
from orch_world import RUN, assert_complete, events
from quartet.v1 import common_pb2 as cpb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb
from quartet_orchestrator import rollouts
from quartet_orchestrator.prompts import Prompts
from quartet_orchestrator.rollouts import fills_context, prompt_tokens
from quartet_orchestrator.state import FAILED, LONG_PROMPT, RESTING

TASKS, GROUP, MOST = 50, 4, 6
#: Groups under way at once: so many may be of a task that comes again, in the next epoch, before it is known.
AT_ONCE = 4


def limited(world, steps=6, most=MOST):
    return world.toml(steps=steps, evals=0, max_prompt_tokens=most)


def trained_tasks(world):
    return {tokens[0] for tokens in world.trainer.disk[RUN, "final"].trained}


def times_sent_out(world):
    """How many groups each task was sent out for; members that are asked for again are the same group."""
    return Counter(task for task, _ in {(one.task_index, one.request_id) for one in world.host.requests})


def test_the_prompt_ends_where_the_policy_begins() -> None:
    rollout = rpb.Rollout()
    assert prompt_tokens(rollout) == 0
    rollout.samples.add(token_ids=[1, 2, 3])
    assert prompt_tokens(rollout) == 0, "of what nothing was sampled in nobody knows"
    rollout.samples.add(token_ids=[1] * 9).spans.add(start=5, length=2)
    rollout.samples[1].spans.add(start=8, length=1)
    assert prompt_tokens(rollout) == 5
    rollout.usage.prompt_tokens = 3
    assert prompt_tokens(rollout) == 3, "what is masked of the answer is no prompt"


def test_a_prompt_that_fails_is_the_first_one() -> None:
    rollout = rpb.Rollout()
    assert not fills_context(rollout)
    rollout.failure.reason = cpb.ERROR_REASON_PROMPT_TOO_LONG
    assert fills_context(rollout)
    rollout.usage.completion_tokens = 1
    assert not fills_context(rollout), "another agent's, of what this one said"


async def test_epochs_are_shuffled_beside_the_event_loop(world, monkeypatch):
    """prompts.py 3: also where tasks at the end of one are passed over."""
    threads, shuffled = [], Prompts._shuffled

    def seen(self, environment, epoch):
        threads.append((epoch, threading.current_thread() is threading.main_thread()))
        return shuffled(self, environment, epoch)

    monkeypatch.setattr(Prompts, "_shuffled", seen)
    world.host.prompt_tokens = {task: MOST + task % 2 for task in range(TASKS)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, limited(world, steps=60), dry_run=False)
        assert_complete(world, await world.rest(runs), steps=60)
    assert threads == [(epoch, False) for epoch in range(len(threads))] and len(threads) >= 3


async def test_none_of_them_is_trained_on_and_each_is_sampled_once(world):
    """Invariant 1, rollouts.py 6: over more than an epoch, at the limit and one above it."""
    world.host.prompt_tokens = {task: MOST + task % 2 for task in range(TASKS)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, limited(world, steps=30), dry_run=False)
        run = await world.rest(runs)
        assert_complete(world, run, steps=30)
    odd = set(range(1, TASKS, 2))
    assert trained_tasks(world) == set(range(TASKS)) - odd, "60 groups of the 25 that are left"
    sent = times_sent_out(world)
    too_long = sum(sent[task] for task in odd)
    assert len(odd) <= too_long <= len(odd) + AT_ONCE and min(sent[task] for task in odd) == 1
    assert run.ledger.discarded == {LONG_PROMPT: GROUP * too_long}
    assert min(sent[task] for task in range(0, TASKS, 2)) >= 2


async def test_restarts_know_which_they_were(world):
    """Invariants 1 and 9: the journal says it."""
    world.host.prompt_tokens = {task: MOST + 1 for task in range(0, TASKS, 2)}
    world.trainer.delay_s = 0.01
    run, restarts = pb.Run(), 0
    while run.phase not in RESTING:
        async with world.orchestrator() as runs:
            run = await runs.submit(RUN, limited(world, steps=30), dry_run=False)
            with suppress(TimeoutError):
                run = await world.rest(runs, timeout_s=0.15 * (1 + restarts / 10))
            restarts += run.phase not in RESTING
    assert restarts >= 2
    assert_complete(world, run, steps=30)
    assert trained_tasks(world) == set(range(1, TASKS, 2))
    assert TASKS // 2 <= run.ledger.discarded[LONG_PROMPT] / GROUP <= TASKS // 2 + AT_ONCE


async def test_one_task_is_enough(world):
    """Epochs are shuffled anew: behind it come the others of this one, and before it those of the next."""
    world.host.prompt_tokens = {task: MOST + 1 for task in range(1, TASKS)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, limited(world, steps=10), dry_run=False)
        run = await world.rest(runs)
        assert_complete(world, run, steps=10)
    assert trained_tasks(world) == {0}


async def test_a_prompt_that_the_context_does_not_hold_is_one_of_them(world):
    """It comes as a failure of the policy, which says so; more of them in a row would stop the run."""
    odd = set(range(1, TASKS, 2))
    world.host.failing_tasks, world.host.kind = odd, rpb.FAILURE_KIND_MODEL
    world.host.reason = cpb.ERROR_REASON_PROMPT_TOO_LONG
    async with world.orchestrator() as runs:
        await runs.submit(RUN, limited(world, steps=30), dry_run=False)
        run = await world.rest(runs)
        assert_complete(world, run, steps=30)
    assert trained_tasks(world) == set(range(0, TASKS, 2)) and run.ledger.discarded.keys() == {LONG_PROMPT}
    sent = times_sent_out(world)
    assert sum(sent[task] for task in odd) <= len(odd) + AT_ONCE


@pytest.mark.parametrize("endless", [False, True])
async def test_those_that_never_come_again_are_not_kept(world, endless):
    """rollouts.py 6: the tasks of an endless environment are read in order, each once."""
    world.host.loaded.infinite = endless
    world.host.prompt_tokens = {task: MOST + 1 for task in range(0, TASKS, 2)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, limited(world), dry_run=False)
        run = await world.rest(runs)
        assert_complete(world, run, steps=6)
        assert run.ledger.discarded[LONG_PROMPT] > 0
        assert bool(runs._held[RUN].book.state.long_prompts) is not endless


async def test_evaluations_measure_them_too(world):
    world.host.prompt_tokens = {}
    async with world.orchestrator() as runs:
        config = world.toml(steps=0, evals=3, max_prompt_tokens=1)
        await runs.submit(RUN, config, dry_run=False)
        run = await world.rest(runs)
    assert run.HasField("reward_before") and not run.ledger.dispatched


async def test_an_environment_of_nothing_else_stops_the_run(world):
    async with world.orchestrator() as runs:
        await runs.submit(RUN, limited(world, most=1), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == FAILED and run.ledger.in_flight == 0, "and not STOPPED: to go on is no use"
    assert TASKS <= run.ledger.discarded[LONG_PROMPT] / GROUP <= TASKS + AT_ONCE
    assert f"the prompts of {TASKS} tasks of environment 'toy'" in run.error
    assert "max_prompt_tokens = 1 tokens, the shortest of them 2; begin another run, with a" in run.error
    assert "with a larger max_prompt_tokens (and a context that holds them), or with tasks" in run.error


async def test_tasks_without_end_stop_the_run_after_so_many(world, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollouts, "MAX_LONG_PROMPTS", 12)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, limited(world, most=1), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == FAILED and "the prompts of 12 tasks of environment 'toy'" in run.error


async def warnings(runs):
    found = [one.note for one in await events(runs) if one.WhichOneof("kind") == "note"]
    return [
        one.message for one in found if one.level == pb.NOTE_LEVEL_WARNING and "the prompts of" in one.message
    ]


async def test_many_in_a_row_are_told_once_and_long_before_the_end(world):
    """rollouts.py 6: of 49 tasks in 50 by a run that goes on, and with the length that would do."""
    world.host.prompt_tokens = {task: MOST + 3 + task for task in range(1, TASKS)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, limited(world, steps=4), dry_run=False)
        assert_complete(world, await world.rest(runs), steps=4)
        (said,) = await warnings(runs)
    assert f"of {rollouts.MANY_LONG_PROMPTS} tasks of environment 'toy'" in said
    shortest = int(said.partition("the shortest of them ")[2].partition(":")[0])
    assert f"more than max_prompt_tokens = {MOST} tokens" in said and MOST + 4 <= shortest <= MOST + TASKS
    assert "1000 in a row fail the run" in said


async def test_a_few_in_a_row_are_not_told(world):
    world.host.prompt_tokens = {task: MOST + task % 2 for task in range(TASKS)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, limited(world), dry_run=False)
        assert_complete(world, await world.rest(runs), steps=6)
        assert await warnings(runs) == []
