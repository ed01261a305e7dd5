"""The step loop against fakes of the trainer and the environment host, over loopback gRPC."""

from __future__ import annotations

import asyncio
import math
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb
from quartet_orchestrator import outage, training
from quartet_orchestrator.book import Book
from quartet_orchestrator.permits import Permits
from quartet_orchestrator.sampling import MEMBER_ATTEMPTS, Sampling
from quartet_orchestrator.segments import Segments
from quartet_orchestrator.state import RESTING

RUN = "run"
# Calls 2..4 and 5..7 are two steps, 8 is the SaveState after them, 9..11 and 12..14 the next two steps.
SECOND_SKIPPED = 13


def assert_complete(world, run, steps=4):
    assert run.phase == pb.RUN_PHASE_COMPLETED, run.error
    final = world.trainer.disk[RUN, "final"]
    assert run.step == steps == final.version
    assert run.ledger.in_flight == 0
    assert run.ledger.trained == steps * 8
    assert run.ledger.dispatched == run.ledger.trained + sum(run.ledger.discarded.values())
    assert run.model_path == "/model"
    assert len(final.trained) == steps * 8


async def events(runs, after=0, rollouts=False):
    return [record async for record in runs.get(RUN).events(after, rollouts=rollouts)]


async def test_a_run_completes(world):
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


@pytest.mark.parametrize("seed", range(4))
async def test_orchestrator_killed_at_random_points(world, seed):
    """Invariants 1, 2 and 9: same final weights as without a kill, every call applied once, the ledger
    balanced, events without gaps."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8, off_policy=0), dry_run=False)
        await world.rest(runs)
    undisturbed = world.trainer.disk[RUN, "final"].weights
    world.trainer.disk.clear()
    world.trainer.applied_calls.clear()
    world.trainer.latest.clear()
    world.trainer.delay_s = 0.01
    world.folder = world.folder / "again"
    seen: list[int] = []
    kills, run = 0, pb.Run()
    while run.phase not in RESTING:
        async with world.orchestrator() as runs:
            run = await runs.submit(RUN, world.toml(steps=8, off_policy=0), dry_run=False)
            with suppress(TimeoutError):
                run = await world.rest(runs, timeout_s=chance.uniform(0.0, 0.15))
            kills += run.phase not in RESTING
            seen += [r.event for r in runs.get(RUN).journal.events(len(seen), 100_000, rollouts=True)]
    assert kills >= 3
    assert_complete(world, run, steps=8)
    assert world.trainer.disk[RUN, "final"].weights == undisturbed
    assert set(world.trainer.applied_calls.values()) == {1}
    assert seen == list(range(1, run.last_event + 1))


@pytest.mark.parametrize("seed", range(3))
async def test_a_power_cut_loses_nothing_that_the_trainer_has(world, seed, monkeypatch):
    """Invariant 2: after each kill the journal's files end where they were synced last."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    synced: dict[Path, tuple[int, int]] = {}
    plain = Segments.syncer

    def syncer(segments):
        sync, place = plain(segments), (segments._last, segments._end)

        def sync_and_note():
            sync()
            synced[segments._folder] = place

        return sync_and_note

    monkeypatch.setattr(Segments, "syncer", syncer)
    world.trainer.delay_s = 0.01
    cuts, run = 0, pb.Run()
    while run.phase not in RESTING:
        async with world.orchestrator() as runs:
            run = await runs.submit(RUN, world.toml(steps=6), dry_run=False)
            with suppress(TimeoutError):
                run = await world.rest(runs, timeout_s=chance.uniform(0.0, 0.15))
        if run.phase not in RESTING:
            cuts += 1
            for folder, (last, end) in synced.items():
                os.truncate(folder / f"{last:06d}.seg", end)
    assert cuts >= 3
    assert_complete(world, run, steps=6)
    assert set(world.trainer.applied_calls.values()) == {1}


@pytest.mark.parametrize("seed", range(3))
async def test_trainer_and_host_killed_at_random_points(world, seed, monkeypatch):
    """Invariants 2 and 9: a batch that was not applied is replayed."""
    monkeypatch.setattr(training, "GUARD_S", 0.05)
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.2)
    print(f"seed {seed}")
    chance = random.Random(seed)
    world.trainer.delay_s = 0.01
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8), dry_run=False)
        for _ in range(4):
            await asyncio.sleep(chance.uniform(0.02, 0.2))
            name = chance.choice(["trainer", "host"])
            await world.kill(name)
            await asyncio.sleep(chance.uniform(0, 0.1))
            await world.serve(name)
        run = await world.rest(runs)
        assert_complete(world, run, steps=8)
        assert run.max_off_policy_steps_seen <= 1


async def test_a_state_saved_without_an_answer_is_found(world):
    # Calls 2..4 and 5..7 are two steps, 8 is the SaveState after them.
    world.trainer.lose_answer_of = {8}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        assert_complete(world, await world.rest(runs))


async def test_members_that_fail_are_tried_again_alone(world):
    """Invariant 5: retried."""
    world.host.failures = {(task, 1): 1 for task in range(50)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert_complete(world, run)
    assert not run.ledger.discarded
    again = [r for r in world.host.requests if list(r.members) == [1]]
    assert len(again) == 8


async def test_a_group_that_fails_for_good_is_replaced_and_counted(world):
    """Invariant 5: excluded whole, and counted; never reward 0."""
    world.host.failing_tasks = set(range(0, 50, 3))
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert_complete(world, run)
    assert set(run.ledger.discarded) == {"failed:ENVIRONMENT"}
    assert not any(tokens[0] % 3 == 0 for tokens in world.trainer.disk[RUN, "final"].trained)


async def test_a_broken_environment_ends_the_run(world):
    world.host.failing_tasks = set(range(50))
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_FAILED
    assert "10 groups in a row failed" in run.error and "broken" in run.error
    assert run.ledger.in_flight == 0
    assert run.ledger.dispatched == sum(run.ledger.discarded.values())


async def test_a_version_outside_the_bound_is_discarded_and_counted(world):
    """Invariant 4: the counted exception."""
    world.host.lie_about_version = {task: 99 for task in range(0, 50, 5)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        run = await world.rest(runs)
    assert_complete(world, run, steps=6)
    assert not any(tokens[2] == 99 for tokens in world.trainer.disk[RUN, "final"].trained)
    assert set(run.ledger.discarded) <= {"version_unpublished"}


async def test_streams_that_break_are_finished_elsewhere(world):
    world.host.break_streams = 5
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        assert_complete(world, await world.rest(runs))
    sizes = [len(r.members) for r in world.host.requests if r.split == epb.SPLIT_TRAIN]
    assert sum(size < 4 for size in sizes) == 5


async def test_a_model_that_answers_nobody_is_an_outage(world, monkeypatch):
    monkeypatch.setattr(outage, "NOTE_AFTER_S", 0.05)
    world.host.kind = rpb.FAILURE_KIND_MODEL
    world.host.failing_tasks = set(range(50))
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(evals=0), dry_run=False)
        await asyncio.sleep(0.5)
        world.host.failing_tasks = set()
        run = await world.rest(runs)
        notes = [r.note.message for r in await events(runs) if r.WhichOneof("kind") == "note"]
    assert_complete(world, run)
    assert not run.ledger.discarded
    assert any("is away" in note for note in notes) and any("is back" in note for note in notes)


async def test_rollouts_without_a_sampled_token_are_no_outage(world):
    """An environment that never asks the model is at fault itself: its groups fail, the run says why."""
    world.host.silent = True
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(evals=0), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_FAILED
    assert "failed:ENVIRONMENT" in run.error and "no token was sampled" in run.error


async def test_a_member_that_the_model_refuses_fails_while_others_are_answered():
    """Answers between two tries of a member say as well as those during one that the model is there."""

    class Hosts:
        tries = 0

        async def run(self, asked):
            self.tries += 1
            rollout = rpb.Rollout(member=0)
            rollout.failure.kind, rollout.failure.retryable = rpb.FAILURE_KIND_MODEL, True
            yield rollout

    def note(message, *, warning=False):
        pass

    hosts, model = Hosts(), outage.Outage("the model", 60.0, note)
    sampling = Sampling(hosts, Permits(1), outage.Outage("the host", 60.0, note), model)

    async def others():
        while True:
            model.answered()
            await asyncio.sleep(0.001)

    beside = asyncio.create_task(others())
    async with asyncio.timeout(20):
        failed = await sampling.complete(epb.RunRolloutsRequest(), [0], lambda _: True, all_or_nothing=True)
    beside.cancel()
    # The first try had nothing before it to compare with.
    assert set(failed) == {0} and hosts.tries <= MEMBER_ATTEMPTS + 1


async def test_a_service_away_for_too_long_stops_the_run_resumable(world):
    """Invariant 7."""
    world.patience_s = 2.0  # longer than a channel takes to connect again
    await world.kill("host")
    services = world.services()
    await world.serve("host")
    await services.close()
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        await world.kill("host")
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_STOPPED and "the environment host has been away" in run.error
        await world.serve("host")
        assert (await runs.resume(RUN)).phase == pb.RUN_PHASE_PENDING
        run = await world.rest(runs)
        assert_complete(world, run)
        assert run.error == ""


async def test_stop_and_resume(world):
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
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=6)
        with pytest.raises(QuartetError, match="COMPLETED"):
            await runs.resume(RUN)


async def test_a_step_that_the_trainer_skipped_counts_and_the_run_goes_on(world):
    world.trainer.losses = [0.5, float("nan"), float("inf")]
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
        assert_complete(world, run)
        seen = await events(runs)
    steps = [record.step for record in seen if record.WhichOneof("kind") == "step"]
    assert [step.metrics["train/skipped_steps"] for step in steps] == [0, 1, 1, 0]
    assert all(math.isfinite(value) for step in steps for value in step.metrics.values())
    assert "train/loss" not in steps[1].metrics and "train/loss" in steps[3].metrics
    notes = [record.note.message for record in seen if record.WhichOneof("kind") == "note"]
    assert sum("skipped the step" in note for note in notes) == 2


async def test_a_model_that_gives_no_numbers_any_more_ends_its_run(world):
    world.trainer.losses = [float("nan")] * training.MAX_SKIPPED_STEPS
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_FAILED and run.error.startswith("step 3: the loss or the gradients")
    assert "learning_rate" in run.error
    assert run.ledger.in_flight == 0
    assert world.trainer.closed == [RUN]


async def test_a_skipped_step_that_is_replayed_is_not_counted_again(world, monkeypatch):
    """Two steps in a row that were skipped stay two, however often the trainer comes back before them."""
    monkeypatch.setattr(training, "GUARD_S", 0.05)
    world.trainer.losses = [0.5, 0.5, float("nan"), float("nan")]
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8), dry_run=False)
        # The state of step 2 is the last one that is saved: a replay begins with the skipped steps.
        while runs.get(RUN).state.applied_seq_id < SECOND_SKIPPED:
            await runs.get(RUN).changed()
        world.trainer.losses = [float("nan"), float("nan")]
        world.trainer.forget()
        assert_complete(world, await world.rest(runs), steps=8)
        seen = await events(runs)
    assert any("replaying" in r.note.message for r in seen)
    notes = [r.note.message for r in seen if "skipped the step" in r.note.message]
    assert len(notes) == 2


@pytest.mark.parametrize("trainer_away", [False, True])
async def test_every_end_of_a_run_closes_it_on_the_trainer(world, trainer_away):
    """A deployment outlives its runs: one after the other, each gets the place of the one before."""
    async with world.orchestrator() as runs:
        for run_id in ("a", "b"):
            await runs.submit(run_id, world.toml(), dry_run=False)
            assert (await world.rest(runs, run_id)).phase == pb.RUN_PHASE_COMPLETED
        assert world.trainer.closed == ["a", "b"] and not world.trainer.runs
        world.trainer.delay_s = 0.05
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        while RUN not in world.trainer.latest:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if trainer_away:
            await world.kill("trainer")
        runs.stop(RUN)
        stopped = await world.rest(runs)
        assert stopped.phase == pb.RUN_PHASE_STOPPED and not world.trainer.runs
        if trainer_away:
            await world.serve("trainer")
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=6)
        assert world.trainer.closed == (["a", "b", RUN] if trainer_away else ["a", "b", RUN, RUN])


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


async def test_a_trainer_driven_by_somebody_else_is_refused(world):
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        await world.rest(runs)
    world.folder = world.folder / "empty"
    assert world.trainer.closed == [RUN]
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_FAILED and "choose another run_id" in run.error
    # It is somebody else's: not closed either.
    assert world.trainer.closed == [RUN] and world.trainer.runs[RUN].version == 4


async def test_a_missing_model_fails_the_run_before_anything_is_sampled(world):
    world.trainer.model_missing = True
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_FAILED and run.error.startswith("model = 'm' is no folder")
    assert not world.host.requests


async def test_a_run_of_no_steps_measures_and_exports(world):
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=0), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_COMPLETED and run.model_path == "/model"
    assert run.reward_before == run.reward_after


async def test_a_version_published_again_with_other_contents_is_noted_and_counted(world, monkeypatch):
    """Invariant 9: the trainer comes back bit-equal; where it does not, somebody is told."""
    monkeypatch.setattr(training, "GUARD_S", 0.05)
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8), dry_run=False)
        while runs.get(RUN).state.step < 3:  # the state of step 2 is saved, version 3 is published
            await runs.get(RUN).changed()
        for state in world.trainer.disk.values():
            state.weights = "not what was saved"
        world.trainer.forget()
        run = await world.rest(runs)
        assert_complete(world, run, steps=8)
        seen = await events(runs)
    notes = [r.note for r in seen if r.WhichOneof("kind") == "note" and "other contents" in r.note.message]
    assert notes and all(note.level == pb.NOTE_LEVEL_WARNING for note in notes)
    assert "version 3 again" in notes[0].message
    changed = [r.step.metrics["train/versions_changed"] for r in seen if r.WhichOneof("kind") == "step"]
    assert sum(changed) == len(notes)


async def test_an_honest_replay_changes_no_version(world, monkeypatch):
    monkeypatch.setattr(training, "GUARD_S", 0.05)
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8), dry_run=False)
        while runs.get(RUN).state.step < 3:
            await runs.get(RUN).changed()
        world.trainer.forget()
        assert_complete(world, await world.rest(runs), steps=8)
        seen = await events(runs)
    assert any("replaying" in r.note.message for r in seen)
    assert not any("other contents" in r.note.message for r in seen)


async def test_the_state_is_the_fold_of_the_records(world):
    """What a restart reads is what the process before it knew, at any moment."""
    world.host.failures = {(task, 1): 1 for task in range(50)}
    world.host.lie_about_version = {task: 99 for task in range(0, 50, 5)}
    world.trainer.delay_s = 0.01
    moments = 0
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=4), dry_run=False)
        book = runs.get(RUN)
        while book.state.phase not in RESTING:
            copy = world.folder / f"copy-{moments}"
            shutil.copytree(world.folder / "runs" / RUN, copy)
            again = Book(copy)
            assert again.state == book.state
            again.close()
            moments += 1
            await book.changed()
    assert moments > 20
