"""Evaluations inside a run: pinned to one version, bounded in time, honest about what is missing."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from orch_world import RUN, assert_complete, events, notes
from quartet.run.evaluation import EvalTrial
from quartet.run.hosted import HostedConfig
from quartet.run.sampling import EvalSamplingConfig
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb
from quartet_orchestrator import outage, run
from quartet_orchestrator.eval_metrics import Outcome, of_evaluation
from quartet_orchestrator.evaluation import Evaluation
from quartet_orchestrator.journal import Journal
from quartet_orchestrator.state import RESTING

TWO = """
interval = 2
rollouts_per_example = 4
timeout_seconds = {}
[[eval.env]]
id = "toy"
name = "easy"
args = {{ level = 1 }}
[[eval.env]]
id = "other"
num_examples = 2
rollouts_per_example = 1
"""


def evaluated(world, limit_s=30.0):
    return world.toml().replace("num_examples = 4", "num_examples = 4" + TWO.format(limit_s))


async def evals_of(runs):
    return [record.eval for record in await events(runs) if record.WhichOneof("kind") == "eval"]


async def test_several_environments_are_measured_apart_at_one_version(world):
    async with world.orchestrator() as runs:
        await runs.submit(RUN, evaluated(world), dry_run=False)
        run = await world.rest(runs)
        found = await evals_of(runs)
    assert_complete(world, run)
    assert [(one.step, one.policy_version) for one in found] == [(0, 0), (2, 2), (4, 4)]
    for one in found:
        metrics = one.metrics
        assert metrics["eval/rollouts"] == 4 * 4 + 2 and metrics["eval/coverage"] == 1
        for name in ("reward", "reward_std", "reward_error", "pass@1", "coverage", "mean_length"):
            assert f"eval/easy/{name}" in metrics and f"eval/other/{name}" in metrics
        assert metrics["eval/easy/pass@4"] >= metrics["eval/easy/pass@1"] >= metrics["eval/easy/pass^4"]
        assert "eval/other/pass@2" not in metrics and "eval/other/reward_within" not in metrics
    asked = [request for request in world.host.requests if request.split == epb.SPLIT_EVAL]
    assert {request.environment.args_json for request in asked if request.environment.id == "toy"} == {
        '{"level": 1}'
    }
    assert all(request.exact_policy_version in (0, 2, 4) for request in asked)
    assert run.reward_before == found[0].metrics["eval/reward"]


async def test_a_stuck_episode_costs_its_deadline_and_coverage_says_so(world):
    """measuring.py 3 and invariant 7: training goes on.

    measuring.py 2
    evaluation.py 2
    """
    world.host.stuck = {("toy", 1)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, evaluated(world, 1.5), dry_run=False)
        run = await world.rest(runs)
        found, said = await evals_of(runs), await notes(runs)
    assert_complete(world, run)
    for one in found:
        assert one.metrics["eval/easy/coverage"] == 12 / 16 and one.metrics["eval/other/coverage"] == 1
        assert one.metrics["eval/easy/failed/UNFINISHED"] == 4
        assert one.metrics["eval/coverage"] == 14 / 18
    assert sum("was ended at 1.5 s" in note for note in said) == 3
    assert sum("has 12 of 16 rollouts of 'easy': 4 UNFINISHED" in note for note in said) == 3


def held_open(world):
    """The event that lets evaluations of version 2 end, and one that is set once such a one was begun."""
    let_go, begun = asyncio.Event(), asyncio.Event()
    rollouts = world.host._rollouts

    async def waiting(request, members):
        if request.split == epb.SPLIT_EVAL and request.exact_policy_version == 2:
            begun.set()
            await let_go.wait()
        async for rollout in rollouts(request, members):
            yield rollout

    world.host._rollouts = waiting
    return let_go, begun


async def learned(world, version):
    """Returns once the trainer has computed the version."""
    async with asyncio.timeout(20):
        while world.trainer.runs[RUN].version < version:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0.01)


async def test_the_next_step_is_learned_while_a_version_is_measured(world):
    """evaluation.py 3: and published after it, so that it was measured to its end."""
    let_go, begun = held_open(world)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, evaluated(world), dry_run=False)
        await asyncio.wait_for(begun.wait(), 20)
        await learned(world, 3)
        await asyncio.sleep(0.2)
        assert world.trainer.latest[RUN] == 2 and runs.get(RUN).state.step == 2
        let_go.set()
        run = await world.rest(runs)
        found = await evals_of(runs)
    assert_complete(world, run)
    assert [(one.step, one.policy_version) for one in found] == [(0, 0), (2, 2), (4, 4)]
    assert all(one.metrics["eval/coverage"] == 1 for one in found)


async def test_a_run_that_is_stopped_while_a_version_is_measured_keeps_what_it_learned(world):
    """evaluation.py 3: the version is measured after all, and no call is made twice."""
    let_go, begun = held_open(world)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, evaluated(world), dry_run=False)
        await asyncio.wait_for(begun.wait(), 20)
        await learned(world, 3)
        runs.stop(RUN)
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_STOPPED
        assert world.trainer.latest[RUN] == 2 and world.trainer.disk[RUN, "closed"].version == 3
        let_go.set()
        await runs.resume(RUN)
        run = await world.rest(runs)
        found = await evals_of(runs)
    assert_complete(world, run)
    assert [(one.step, one.policy_version) for one in found] == [(0, 0), (2, 2), (4, 4)]
    assert all(one.metrics["eval/coverage"] == 1 for one in found)
    assert set(world.trainer.applied_calls.values()) == {1}


async def test_an_evaluation_that_fails_ends_the_step_beside_it(world, monkeypatch):
    measure = Evaluation.measure

    async def broken(self, step):
        if step == 2:
            world.trainer.delay_s = 60.0
            await asyncio.sleep(0.1)
            raise outage.RunFailed("of the test")
        await measure(self, step)

    monkeypatch.setattr(Evaluation, "measure", broken)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, evaluated(world), dry_run=False)
        run = await world.rest(runs, timeout_s=20)
    assert run.phase == pb.RUN_PHASE_FAILED and "of the test" in run.error and run.step == 2


async def test_a_version_that_is_gone_before_somebody_wants_it_measured_is_not(world, monkeypatch):
    """Nor is an evaluation without a result written down: the interval was changed between a publication and
    the record of its step."""
    record_step, published = run.record_step, asyncio.Event()

    async def never(book, config, batch, trained):
        if batch == 2 and not published.is_set():
            published.set()
            await asyncio.Event().wait()
        await record_step(book, config, batch, trained)

    monkeypatch.setattr(run, "record_step", never)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        await asyncio.wait_for(published.wait(), 20)
        now = world.toml(steps=6).replace("num_examples = 4", "num_examples = 4\ninterval = 2")
        await runs.submit(RUN, now, dry_run=False)
        assert_complete(world, await world.rest(runs), steps=6)
        found = await evals_of(runs)
    assert [(one.step, one.metrics["eval/coverage"]) for one in found] == [(0, 1.0), (4, 1.0), (6, 1.0)]


async def test_an_evaluation_never_mixes_versions(world, monkeypatch):
    """measuring.py 1: what another version sampled is a failure, and no part of the mean."""
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.01)
    world.host.lie_in_evaluations = {2: 7}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
        found = await evals_of(runs)
        records = await events(runs, rollouts=True)
    assert_complete(world, run)
    assert all(one.metrics["eval/toy/failed/MODEL"] == 1 for one in found)
    assert all(one.metrics["eval/coverage"] == 3 / 4 for one in found)
    lied = [
        record.eval_rollout.rollout.rollout
        for record in records
        if record.WhichOneof("kind") == "eval_rollout" and record.eval_rollout.rollout.task_index == 2
    ]
    assert {rollout.failure.message for rollout in lied} == {
        f"sampled by versions [7], where {version} is pinned" for version in (0, 4)
    }
    assert not any(rollout.reward for rollout in lied)


async def test_an_evaluation_without_any_result_is_no_end_of_training(world):
    """Invariant 5: no result is no reward 0 either.

    eval_metrics.py 2
    """
    world.host.stuck = {("toy", task) for task in range(4)}
    toml = world.toml().replace("num_examples = 4", "num_examples = 4\ntimeout_seconds = 0.2")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        run = await world.rest(runs)
        found = await evals_of(runs)
    assert_complete(world, run)
    assert not run.HasField("reward_before") and not run.HasField("reward_after")
    assert all("eval/reward" not in one.metrics and one.metrics["eval/coverage"] == 0 for one in found)


async def test_after_a_restart_only_what_is_missing_is_measured(world):
    """evaluation.py 1."""
    world.host.max_delay_s = 0.05
    run, restarts = pb.Run(), 0
    while run.phase not in RESTING:
        async with world.orchestrator() as runs:
            run = await runs.submit(RUN, evaluated(world), dry_run=False)
            with suppress(TimeoutError):
                run = await world.rest(runs, timeout_s=0.1 * (1 + restarts / 10))
            restarts += run.phase not in RESTING
            journal = runs.get(RUN).journal
            good = Counter(
                (step, rollout.group, rollout.rollout.member)
                for step in (0, 2, 4)
                for record in journal.select("eval_rollout", step=step)
                if not (rollout := record.eval_rollout.rollout).rollout.HasField("failure")
            )
    assert restarts >= 2
    assert_complete(world, run)
    assert set(good.values()) == {1} and len(good) == 3 * 18


def counted(monkeypatch, wanted):
    """How many records of a kind each lookup from here on reads."""
    plain, read = Journal.select, []

    def select(self, kind, **asked):
        found = plain(self, kind, **asked)
        read.extend([len(found)] if kind == wanted else [])
        return found

    monkeypatch.setattr(Journal, "select", select)
    return read


async def test_what_is_there_of_an_evaluation_is_read_by_example(world, monkeypatch):
    """Invariant 8, evaluation.py 1: all of its rollouts may be more than fit into memory."""
    world.host.stuck = {("toy", 3)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, evaluated(world), dry_run=False)
        book = runs.get(RUN)
        while len(book.journal.select("eval_rollout", step=0)) < 3 * 4 + 2:
            await book.changed()
    world.host.stuck.clear()
    world.host.requests.clear()
    read = counted(monkeypatch, "eval_rollout")
    async with world.orchestrator() as runs:
        assert_complete(world, await world.rest(runs))
    assert max(read) == 4 and sum(read) == 14
    again = [
        one for one in world.host.requests if one.exact_policy_version == 0 and one.split == epb.SPLIT_EVAL
    ]
    assert [(one.environment.id, one.task_index) for one in again] == [("toy", 3)]


async def test_no_more_is_read_after_many_evaluations_than_after_a_few(world, monkeypatch):
    """Invariant 8: whether the last one fell is told by a few of them."""
    read = counted(monkeypatch, "eval")
    async with world.orchestrator() as runs:
        await runs.submit(
            RUN, world.toml(steps=12, evals=1).replace("[ckpt]", "interval = 1\n[ckpt]"), dry_run=False
        )
        assert_complete(world, await world.rest(runs), steps=12)
        assert len(await evals_of(runs)) == 13
    assert read and sum(read) <= 4 * 13


def test_figures_by_hand():
    """eval_metrics.py 1"""
    hosted = HostedConfig(id="e")
    one = Outcome(EvalTrial("e", hosted, 2, 2, EvalSamplingConfig()), 2)
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 1.0}
    for (example, member), reward in rewards.items():
        failed = rpb.Rollout(member=member)
        failed.failure.kind = rpb.FAILURE_KIND_SCORER
        one.ended(example, failed)  # an attempt that was tried again
        told = {"metrics": {"steps": 3.0 + member}, "rewards": {"exact": reward, "kind": float("nan")}}
        one.ended(example, rpb.Rollout(member=member, reward=reward, **told))
    lost = rpb.Rollout(member=1)
    lost.failure.kind = rpb.FAILURE_KIND_TIMEOUT
    one.ended(1, lost)
    values = of_evaluation([one], 0.5)
    assert values["eval/e/coverage"] == values["eval/coverage"] == 3 / 4
    assert values["eval/e/failed/TIMEOUT"] == 1 and "eval/e/failed/SCORER" not in values
    assert values["eval/e/reward"] == 2 / 3 and values["eval/e/reward_within"] == 0.5
    # Example 0 has one pass of two, example 1 one of one: pass@1 is their mean, pass@2 that of example 0.
    assert values["eval/e/pass@1"] == 0.75 and values["eval/e/pass@2"] == 1 and values["eval/e/pass^2"] == 0
    assert values["eval/e/rewards/exact"] == 2 / 3 and values["eval/e/metrics/steps"] == 10 / 3
    assert "eval/e/rewards/kind" not in values, "nan is no number of JSON"
