"""The step loop against fakes of the trainer and the environment host, over loopback gRPC."""

from __future__ import annotations

import asyncio

import pytest
from orch_world import RUN, assert_complete, events
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator.prompts import Prompts, Source


async def test_a_run_completes(world):
    world.trainer.off_members = {1, 3}  # which replica-1 samples
    async with world.orchestrator() as runs:
        submitted = await runs.submit(RUN, world.toml(), dry_run=False)
        assert submitted.phase == pb.RUN_PHASE_PENDING
        run = await world.rest(runs)
        assert_complete(world, run)
        assert run.reward_before > 0 and run.HasField("reward_after")
        assert run.max_off_policy_steps_seen <= 1 and run.max_logprob_difference == 1e-6
        seen = await events(runs, rollouts=True)
        assert [record.event for record in seen] == list(range(1, run.last_event + 1))
        phases = [r.phase.run.phase for r in seen if r.WhichOneof("kind") == "phase"]
        evaluating = pb.RUN_PHASE_EVALUATING
        assert phases == [1, evaluating, pb.RUN_PHASE_TRAINING, evaluating, pb.RUN_PHASE_COMPLETED]
        steps = [r.step for r in seen if r.WhichOneof("kind") == "step"]
        assert [step.step for step in steps] == [1, 2, 3, 4]
        wanted = (
            "train/reward train/reward_std train/loss train/learning_rate train/grad_norm train/entropy "
            "train/tokens train/logprob_difference_max rollout/mean_length rollout/generation_time "
            "rollout/truncated_fraction rollout/failed staleness/max staleness/mean time/step_s "
            "time/wait_rollouts_s time/train_s tokens_per_second env/toy/reward rewards/match"
        )
        assert not set(wanted.split()) - set(steps[0].metrics)
        assert steps[-1].ledger.trained == 32
        of_replicas = [f"train/logprob_difference_by_replica/replica-{number}:1" for number in (0, 1)]
        assert [steps[-1].metrics[name] for name in of_replicas] == pytest.approx([0.01, 0.8])
        assert runs.get(RUN).state.replicas == {"replica-0:1", "replica-1:1"}
        (said,) = [r.note.message for r in seen if "engine disagree" in r.note.message]
        assert "tokens that replica-1:1 sampled were 0.8 nats apart" in said, "invariant 6, by whom"
        for names in (steps[-1].metrics, runs.get(RUN).state.eval_metrics):
            below = [one for one in names for name in names if one.startswith(f"{name}/")]
            assert not below, "MLflow may make files of them"
        tail = await events(runs, after=run.last_event - 2, rollouts=True)
        assert [record.event for record in tail] == [run.last_event - 1, run.last_event]


async def test_every_token_is_within_the_bound_and_evaluations_are_pinned(world):
    """Invariant 4, over gRPC."""
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(off_policy=0), dry_run=False)
        run = await world.rest(runs)
    assert run.max_off_policy_steps_seen == 0
    for number, tokens in enumerate(world.trainer.disk[RUN, "final"].trained):
        assert tokens[2] == number // 8
    for request in world.host.requests:
        if request.split == epb.SPLIT_EVAL:
            assert request.exact_policy_version == request.min_policy_version
    # Asked for, and not only found at the end: an engine that lags would sample what is thrown away then.
    asked = [
        (int(request.request_id.split("/")[1].removeprefix("group-")), request.min_policy_version)
        for request in world.host.requests
        if request.split == epb.SPLIT_TRAIN
    ]
    assert asked == [(group, group // 2) for group, _ in asked] and len(asked) == 2 * run.step


@pytest.mark.parametrize("off_policy", [0, 3])
async def test_who_is_slow_is_waited_for_so_speed_chooses_nothing(world, off_policy):
    """docs/algorithms.md: the tasks of a batch are those of its places, in the shuffled order."""
    quick = world.host._rollouts

    async def rollouts(request, members):
        if request.task_index % 3 == 0:
            await asyncio.sleep(0.1)  # longer than everything else of a step
        async for rollout in quick(request, members):
            yield rollout

    world.host._rollouts = rollouts
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8, off_policy=off_policy, evals=0), dry_run=False)
        assert_complete(world, await world.rest(runs), steps=8)
    trained = [tokens[0] for tokens in world.trainer.disk[RUN, "final"].trained]
    prompts = Prompts([Source("toy", 50)], seed=0)
    for batch in range(8):
        wanted = [prompts.task(0, batch * 2 + place) for place in range(2) for _ in range(4)]
        assert sorted(trained[batch * 8 : batch * 8 + 8]) == sorted(wanted), batch


@pytest.mark.parametrize(("version", "reason"), [(99, "version_unpublished"), (0, "stale")])
async def test_a_version_outside_the_bound_is_discarded_and_counted(world, version, reason):
    """Invariant 4: the counted exception.

    rollouts.py 3
    """
    world.host.lie_about_version = dict.fromkeys(range(0, 50, 2), version)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        run = await world.rest(runs)
    assert_complete(world, run, steps=6)
    trained = [tokens[2] for tokens in world.trainer.disk[RUN, "final"].trained]
    assert all(0 <= batch - trained[8 * batch + at] <= 1 for batch in range(6) for at in range(8))
    assert run.ledger.discarded.keys() == {reason}


async def test_stop_and_resume(world):
    """execution.py 1"""
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        while runs.get(RUN).state.step < 2:
            await runs.get(RUN).changed()
        assert runs.stop(RUN).phase == pb.RUN_PHASE_STOPPING
        stopped = await world.rest(runs)
        assert stopped.phase == pb.RUN_PHASE_STOPPED and 2 <= stopped.step < 6
        assert runs.stop(RUN).phase == pb.RUN_PHASE_STOPPED
    async with world.orchestrator() as runs:
        assert runs.get(RUN).state.phase == pb.RUN_PHASE_STOPPED
        # Asked twice at once, as by a client that tries again: one task all the same.
        resumed = await asyncio.gather(runs.resume(RUN), runs.resume(RUN))
        assert {run.phase for run in resumed} == {pb.RUN_PHASE_PENDING}
        assert len([task for task in asyncio.all_tasks() if task.get_name() == f"run-{RUN}"]) == 1
        assert_complete(world, await world.rest(runs), steps=6)
        with pytest.raises(QuartetError, match="COMPLETED"):
            await runs.resume(RUN)


async def test_a_stopped_run_goes_on_where_it_was_closed(world):
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        book = runs.get(RUN)
        while book.state.step < 3:
            await book.changed()
        runs.stop(RUN)
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_STOPPED
        assert world.trainer.disk[RUN, "closed"].applied == book.state.applied_seq_id
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=6)
        # Nothing had to be replayed.
        assert set(world.trainer.applied_calls.values()) == {1}


async def test_a_step_that_the_trainer_has_begun_is_finished_before_a_stop(world):
    """run.py: trained, published and told, not left between two of its calls."""
    world.trainer.delay_s = 0.05
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        book = runs.get(RUN)
        while 2 not in book.state.batches:
            await book.changed()
        runs.stop(RUN)
        stopped = await world.rest(runs)
        assert (stopped.phase, stopped.step) == (pb.RUN_PHASE_STOPPED, 3)
        assert world.trainer.latest[RUN] == world.trainer.disk[RUN, "closed"].version == 3
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=6)


async def test_a_stop_that_takes_its_time_is_told_to_whoever_resumes(world, monkeypatch):
    monkeypatch.setattr("quartet_orchestrator.going_on.STOP_S", 0.1)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        book = runs.get(RUN)
        while 2 not in book.state.batches:
            await book.changed()
        await world.kill("trainer")
        runs.stop(RUN)
        wanted = r"is STOPPING \(training step 3.*; resume it once it is STOPPED"
        with pytest.raises(QuartetError, match=wanted):
            await runs.resume(RUN)
        await world.serve("trainer")
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_STOPPED
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=6)


async def test_a_run_of_no_steps_measures_and_exports(world):
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=0), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_COMPLETED and run.model_path == "/model"
    assert run.reward_before == run.reward_after


async def test_at_most_so_many_rollouts_are_under_way_in_training_and_evaluations_together(world):
    """sampling.py 3 and invariant 8."""
    world.host.max_delay_s = 0.01
    toml = world.toml(steps=6, max_concurrent=8).replace("num_examples = 4", "num_examples = 4\ninterval = 2")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        assert_complete(world, await world.rest(runs), steps=6)
    assert world.host.most_under_way == 8
