"""What a run does with its trainer beyond the plain course: skipped steps, replays, the end, refusals."""

from __future__ import annotations

import asyncio
import math

import pytest
from orch_fakes import TrainerRun
from orch_world import RUN, assert_complete, events, until
from quartet.errors import QuartetError
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator import admission, answers, training
from quartet_orchestrator.trainer_client import TrainerClient

# Calls 2..4 and 5..7 are two steps, 8 is the SaveState after them, 9..11 and 12..14 the next two steps.
SECOND_SKIPPED = 13


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
    """answers.py 2"""
    world.trainer.losses = [float("nan")] * answers.MAX_SKIPPED_STEPS
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_FAILED and run.error.startswith("step 3: the loss or the gradients")
    assert "learning_rate" in run.error
    assert run.ledger.in_flight == 0
    assert world.trainer.closed == [RUN]


@pytest.mark.parametrize("losses", [[0.5, *[math.nan] * 3], [math.nan, 0.5, *[math.nan] * 3]])
async def test_skipped_steps_are_counted_over_restarts(world, losses):
    """answers.py 2: each of them was heard of by another process."""
    world.trainer.losses, world.trainer.delay_s = list(losses), 0.05
    run = None
    for step in range(1, len(losses)):
        async with world.orchestrator() as runs:
            if step == 1:
                await runs.submit(RUN, world.toml(steps=8, evals=0), dry_run=False)
            book = runs.get(RUN)
            async with asyncio.timeout(60):
                while book.state.step < step and book.state.phase != pb.RUN_PHASE_FAILED:
                    await book.changed()
    async with world.orchestrator() as runs:
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_FAILED
    assert run.error.startswith(f"step {len(losses)}: the loss or the gradients of 3 steps in a row")


@pytest.mark.parametrize("field", ["policy_version", "version"])
async def test_a_trainer_that_counts_versions_otherwise_stops_the_run_at_once(world, field):
    """answers.py 3: a trainer of somebody's own, say, that goes back, or counts from 1."""
    rpc = "PublishWeights" if field == "version" else "OptimStep"
    plain = getattr(world.trainer, rpc)

    async def goes_back(request, context):
        answer = await plain(request, context)
        if getattr(answer, field) == 3:
            setattr(answer, field, 2)
        return answer

    setattr(world.trainer, rpc, goes_back)
    await world.kill("trainer")
    await world.serve("trainer")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
        written = runs.get(RUN).state.applied_seq_id
    assert run.phase == pb.RUN_PHASE_STOPPED and run.step == 2
    assert run.error.startswith(
        f"{rpc} of step 3: the trainer answers with version 2 after 3 optimizer steps"
    )
    # Calls 9 to 11 are the third step's: the answer is not in the journal.
    assert written == (9 if field == "policy_version" else 10)


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
    assert any("done once more from the journal" in r.note.message for r in seen)
    notes = [r.note.message for r in seen if "skipped the step" in r.note.message]
    assert len(notes) == 2


@pytest.mark.parametrize("trainer_away", [False, True])
async def test_every_end_of_a_run_closes_it_on_the_trainer(world, trainer_away):
    """A deployment outlives its runs: one after the other, each gets the place of the one before.

    closing.py 3
    """
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


@pytest.mark.parametrize("stopping", [True, False])
@pytest.mark.parametrize("refused", [True, False])
async def test_a_run_that_is_stopped_over_a_restart_is_closed_on_the_trainer(
    world, monkeypatch, stopping, refused
):
    """execution.py 2, closing.py 1: killed after the stop or before it, and with a configuration that the new
    process refuses, too."""
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6, evals=0), dry_run=False)
        book = runs.get(RUN)
        while book.state.step < 1:
            await book.changed()
        world.trainer.delay_s = 2.0
        while "training" not in runs._held[RUN].run.doing:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if stopping:
            assert runs.stop(RUN).phase == pb.RUN_PHASE_STOPPING
        applied = book.state.applied_seq_id
    assert not world.trainer.closed and world.trainer.runs[RUN].applied == applied
    world.trainer.delay_s = 0.0
    plain = admission.parse

    def parse(config_toml):
        if refused:
            raise QuartetError("INVALID_CONFIG", "max_steps is not a key", key="max_steps")
        return plain(config_toml)

    monkeypatch.setattr(admission, "parse", parse)
    async with world.orchestrator() as runs:
        if not stopping and not refused:
            runs.stop(RUN)
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_STOPPED
        assert ("refused by this version" in run.error) == (refused and not stopping)
        assert world.trainer.closed == [RUN] and not world.trainer.runs
        assert world.trainer.disk[RUN, "closed"].applied == applied
        assert not runs.get(RUN).journal.is_open
        refused = False
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=6)
    # Nothing had to be replayed.
    assert set(world.trainer.applied_calls.values()) == {1}


async def test_a_trainer_that_comes_back_whole_may_do_so_as_often_as_it_likes(world, monkeypatch):
    """While rollouts last no call is due, so there is no progress that it could make."""
    monkeypatch.setattr(training, "GUARD_S", 0.01)
    monkeypatch.setattr(training, "MAX_RESTORES", 2)
    made, go_on = world.host._rollouts, asyncio.Event()

    async def slow(request, members):
        if request.min_policy_version == 2:  # of whose step the newest state is
            await go_on.wait()
        async for rollout in made(request, members):
            yield rollout

    world.host._rollouts = slow
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(off_policy=0, evals=0), dry_run=False)
        await until(lambda: world.trainer.disk)
        for _ in range(2 * training.MAX_RESTORES + 1):
            await until(lambda: RUN in world.trainer.runs)
            world.trainer.forget()
        await until(lambda: RUN in world.trainer.runs)
        go_on.set()
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_COMPLETED, run.error


async def test_a_trainer_that_a_batch_kills_each_time_stops_the_run(world, monkeypatch):
    """However whole it comes back: it is at the call that is due that it makes no progress."""
    monkeypatch.setattr(training, "MAX_RESTORES", 2)
    send, killed = TrainerClient.forward_backward, 0

    async def kills(self, frames):
        nonlocal killed
        if not world.trainer.disk:
            return await send(self, frames)
        killed += 1
        world.trainer.forget()
        raise QuartetError("RUN_UNKNOWN", "no such run", run_id=RUN)

    with monkeypatch.context() as patch:
        patch.setattr(TrainerClient, "forward_backward", kills)
        async with world.orchestrator() as runs:
            await runs.submit(RUN, world.toml(evals=0), dry_run=False)
            run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_STOPPED and "2 times without progress" in run.error
    assert killed == training.MAX_RESTORES + 1
    async with world.orchestrator() as runs:  # it has more memory now
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs))


async def test_a_trainer_driven_by_somebody_else_is_refused(world):
    """training.py 4, closing.py 2"""
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        await world.rest(runs)
    world.folder = world.folder / "empty"
    assert world.trainer.closed == [RUN]
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_STOPPED and "choose another run_id" in run.error
    # It is somebody else's: not closed either.
    assert world.trainer.closed == [RUN] and world.trainer.runs[RUN].version == 4


async def test_a_missing_model_fails_the_run_before_anything_is_sampled(world):
    world.trainer.model_missing = True
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_FAILED
    said = "model = 'm' is refused by the trainer: there is no folder /m; create it, or name another"
    assert said in run.error and "base_model" not in run.error
    assert not world.host.requests


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_run_that_failed_before_it_sampled_begins_again(world, restarted):
    """going_on.py 2: once the cause is mended; as often as that is asked, it is one run."""
    world.trainer.model_missing = True
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_FAILED
        assert (await runs.resume(RUN)).phase == pb.RUN_PHASE_PENDING
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_FAILED, "it is not mended yet"
        if not restarted:
            world.trainer.model_missing = False
            again = await asyncio.gather(runs.resume(RUN), runs.resume(RUN))
            assert [(run.phase, run.error) for run in again] == [(pb.RUN_PHASE_PENDING, "")] * 2
            assert_complete(world, await world.rest(runs))
            return
    world.trainer.model_missing = False
    async with world.orchestrator() as runs:
        assert runs.status(RUN).phase == pb.RUN_PHASE_FAILED, "until somebody asks"
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs))


async def test_a_version_published_again_with_other_contents_is_noted_and_counted(world, monkeypatch):
    """Invariant 9: the trainer comes back bit-equal; where it does not, somebody is told.

    answers.py 1
    """
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
    """training.py 5: and replicas are found to have come to it while the step after it is still computed."""
    monkeypatch.setattr(training, "GUARD_S", 0.05)
    world.trainer.delay_s = 0.02
    goes_on, apply = asyncio.Event(), world.trainer._apply
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8), dry_run=False)
        while runs.get(RUN).state.step < 3:
            await runs.get(RUN).changed()
        trained, state = runs._held[RUN].run._training, runs.get(RUN).state

        async def holds(run_id, seq_id, call):
            if run_id in world.trainer.runs and seq_id > state.applied_seq_id:
                await goes_on.wait()
            return await apply(run_id, seq_id, call)

        monkeypatch.setattr(world.trainer, "_apply", holds)
        world.trainer.forget()
        await until(lambda: trained._next <= state.applied_seq_id)
        assert trained.replays
        await until(lambda: not trained.replays)
        goes_on.set()
        assert_complete(world, await world.rest(runs), steps=8)
        seen = await events(runs)
    assert any("done once more from the journal" in r.note.message for r in seen)
    assert not any("other contents" in r.note.message for r in seen)


async def test_a_run_that_is_stopped_before_the_trainer_answers_closes_nobody_elses(world):
    """training.py, close: the trainer never said whether the run of that name is this orchestrator's."""
    begun = asyncio.Event()

    async def waits(request, context):
        begun.set()
        await asyncio.Event().wait()

    world.trainer.CreateRun = waits
    await world.kill("trainer")
    await world.serve("trainer")
    theirs = world.trainer.runs[RUN] = TrainerRun(b"another spec", applied=50)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        await begun.wait()
        runs.stop(RUN)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_STOPPED
    assert not world.trainer.closed and world.trainer.runs == {RUN: theirs}


async def test_a_run_that_is_stopped_while_the_trainer_loads_is_closed_there(world):
    """training.py, close: what CreateRun began is finished there, whoever stopped waiting for it."""
    plain, begun, finished, made = world.trainer.CreateRun, asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def loads_a_large_model(request, context):
        begun.set()

        async def work():
            await finished.wait()
            answer = await plain(request, context)
            made.set()
            return answer

        return await asyncio.shield(asyncio.create_task(work()))

    closed = world.trainer.CloseRun

    async def closes_behind_it(request, context):
        finished.set()
        await made.wait()
        return await closed(request, context)

    world.trainer.CreateRun, world.trainer.CloseRun = loads_a_large_model, closes_behind_it
    await world.kill("trainer")
    await world.serve("trainer")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        await begun.wait()
        runs.stop(RUN)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_STOPPED
    assert world.trainer.closed == [RUN] and not world.trainer.runs
