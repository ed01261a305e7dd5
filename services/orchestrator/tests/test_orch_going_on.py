"""A run that rests goes on: a completed one with more steps, and what is said of everything else."""

from __future__ import annotations

import asyncio
import copy
import errno
import gc
import os
import time
import weakref

import pytest
from orch_world import RUN, assert_complete, events
from quartet.errors import QuartetError
from quartet.run.config import parse_run
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator import going_on
from quartet_orchestrator import run as training_run
from quartet_orchestrator.calls import CallPlan
from quartet_orchestrator.run import TrainingRun
from quartet_orchestrator.segments import JournalCorrupt
from quartet_orchestrator.state import COMPLETED, FAILED, RunState


async def completed(world, runs, steps, run_id=RUN, **more):
    """A run, submitted with so many steps, at its end."""
    await runs.submit(run_id, world.toml(steps=steps, off_policy=0, **more), dry_run=False)
    return await world.rest(runs, run_id)


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("ends", [(4, 8), (3, 6), (0, 3, 5)])
async def test_an_extended_run_is_one_that_had_more_steps_from_the_start(world, ends, restarted):
    """runs.py 4, going_on.py 3: nothing twice, nothing lost, nor for its followers (invariants 1 and 2)."""
    async with world.orchestrator() as runs:
        run = await completed(world, runs, ends[0])
        seen = await events(runs)
        if not restarted:
            for steps in ends[1:]:
                run = await completed(world, runs, steps)
                seen += await events(runs, after=seen[-1].event)
    for steps in ends[1:] if restarted else ():
        async with world.orchestrator() as runs:
            run = await completed(world, runs, steps)
            seen += await events(runs, after=seen[-1].event)
    assert_complete(world, run, steps=ends[-1])
    assert run.max_steps == ends[-1] and f"max_steps = {ends[-1]}" in run.config_toml
    assert run.HasField("reward_before") and run.HasField("reward_after")
    # One after the other.
    assert set(world.trainer.applied_calls.values()) == {1}
    async with world.orchestrator() as runs:
        state = runs.get(RUN).state
        assert state.earlier_ends == list(ends[:-1]) and state.phase == pb.RUN_PHASE_COMPLETED
        assert await events(runs) == seen
        await completed(world, runs, ends[-1], "straight")
    steps = [record.step.step for record in seen if record.WhichOneof("kind") == "step"]
    assert steps == list(range(1, ends[-1] + 1))
    assert sum(r.phase.run.phase == pb.RUN_PHASE_COMPLETED for r in seen) == len(ends)
    one, other = (world.trainer.disk[run_id, "final"] for run_id in (RUN, "straight"))
    assert one.trained == other.trained and one.weights == other.weights
    assert one.spec.optimizer.earlier_total_steps == list(ends[:-1])


async def test_an_extended_run_tells_what_it_has_and_not_what_it_had(world):
    async with world.orchestrator() as runs:
        await completed(world, runs, 3)
        world.trainer.delay_s = 0.05
        run = await runs.submit(RUN, world.toml(steps=6, off_policy=0), dry_run=False)
        assert (run.phase, run.step, run.max_steps) == (pb.RUN_PHASE_PENDING, 3, 6)
        assert not run.model_path and not run.HasField("reward_after") and run.HasField("reward_before")
        assert run.last_event == runs.get(RUN).journal.last_event
        assert runs.get(RUN).run() == run
        runs.stop(RUN)
        stopped = await world.rest(runs)
        assert stopped.phase == pb.RUN_PHASE_STOPPED and not stopped.model_path
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=6)
        told = [one for one in await events(runs) if one.WhichOneof("kind") == "phase"]
        assert run in [one.phase.run for one in told]  # its followers were told the same
        assert [one.phase.run.last_event for one in told] == [one.event for one in told]


async def test_invariant_9_a_trainer_that_lost_every_state_replays_an_extended_run(world):
    async with world.orchestrator() as runs:
        await completed(world, runs, 3)
        world.trainer.delay_s = 0.02
        await runs.submit(RUN, world.toml(steps=6, off_policy=0), dry_run=False)
        while runs.get(RUN).state.step < 5:
            await runs.get(RUN).changed()
        await world.kill("trainer")
        world.trainer.disk.clear()
        await world.serve("trainer")
        assert_complete(world, await world.rest(runs), steps=6)
        plan = CallPlan(max_steps=6, earlier_ends=[3], save_interval=2, keep_last=2)
        again = [seq_id for seq_id, times in world.trainer.applied_calls.items() if times == 2]
        assert set(range(1, plan.published_by(3))) <= set(again)
        seen = await events(runs)
    assert not any(record.step.metrics.get("train/versions_changed") for record in seen)


async def test_a_run_is_made_longer_once_it_is_completed_and_in_nothing_else(world):
    """going_on.py 3: who asks for something else is told what works, and nothing changes."""
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:

        async def refused(match, reason="RUN_CONFLICT", **more):
            with pytest.raises(QuartetError, match=match) as caught:
                await runs.submit(RUN, world.toml(**more), dry_run=False)
            assert caught.value.reason == reason

        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        while runs.get(RUN).state.step < 1:
            await runs.get(RUN).changed()
        too_early = r"not 9; it is {} at step .*COMPLETED: {} go on to its 6 steps, then submit it with 9"
        await refused(too_early.format("TRAINING", "let it"), steps=9)
        runs.stop(RUN)
        await world.rest(runs)
        await refused(too_early.format("STOPPED", "resume it, and let it"), steps=9)
        await runs.resume(RUN)
        await world.rest(runs)
        with pytest.raises(QuartetError, match=r"COMPLETED and cannot be resumed; .*max_steps above 6"):
            await runs.resume(RUN)
        await refused("a run is made longer, once it is COMPLETED, and never shorter", steps=5)
        await refused("another configuration: seed was 0 and is 3; choose another run_id", steps=9, seed=3)
        before = runs.status(RUN)
        assert await runs.submit(RUN, world.toml(steps=9), dry_run=True) == before
        assert await runs.submit(RUN, world.toml(steps=6), dry_run=False) == before
        assert runs.status(RUN) == before and before.phase == pb.RUN_PHASE_COMPLETED


async def test_a_run_that_this_was_started_for_says_so_until_it_is_asked_for(world):
    """runs.py 5: of a run at rest a follower is told whether it is about to go on."""
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        runs.stop(RUN)
        await world.rest(runs)
        assert runs.status(RUN).doing == ""
    world.goes_on_with = "other"
    async with world.orchestrator() as runs:
        assert runs.status(RUN).doing == ""
    world.goes_on_with = RUN
    async with world.orchestrator() as runs:
        assert runs.status(RUN).doing == "is being started again"
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        assert runs.status(RUN).doing == "is being started again", "it is resumed next"
        assert not any("started again" in one.phase.run.doing for one in await events(runs))
        assert (await runs.resume(RUN)).doing == ""
        runs.stop(RUN)
        await world.rest(runs)
        assert runs.status(RUN).doing == "", "this time it rests"
        await runs.resume(RUN)
        await world.rest(runs)
    async with world.orchestrator() as runs:
        assert runs.status(RUN).doing == "is being started again"
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        assert runs.status(RUN).doing == "", "with no more steps it is completed"
    world.goes_on_with = "new"
    async with world.orchestrator() as runs:
        assert not (await completed(world, runs, 1, "new")).doing, "it had never come to the orchestrator"
        assert runs.status("new").doing == ""


@pytest.mark.parametrize("sampled", [False, True])
def test_a_run_that_failed_is_made_longer_by_nobody(sampled):
    """going_on.py 2 and 3: one that sampled is over; one that did not is resumed first."""
    toml = 'model = "m"\nmax_steps = {}\n[[env]]\nid = "e"'
    known, asked = parse_run(toml.format(6)), parse_run(toml.format(9))
    run = RunState(run_id=RUN, phase=FAILED, max_steps=6, next_group=3, first_group=0 if sampled else 3)
    assert going_on.is_over(run) == sampled
    with pytest.raises(QuartetError, match="it is FAILED at step 0") as refused:
        going_on.check_extends(run, known, asked)
    assert refused.value.reason == "RUN_CONFLICT"
    assert refused.value.metadata == {"run_id": RUN, "field": "max_steps"}
    assert ("submit a new run" in refused.value.message) == sampled
    if sampled:
        with pytest.raises(QuartetError, match="is FAILED and cannot be resumed; submit a new run"):
            going_on.check_resumable(run)
    else:
        going_on.check_resumable(run)
    run.phase = COMPLETED
    assert going_on.is_over(run)
    going_on.check_extends(run, known, asked)


def test_a_journal_that_is_damaged_is_told_as_what_it_is():
    """going_on.py 1"""
    with pytest.raises(QuartetError, match="segment 3") as refused, going_on.written(RUN):
        raise JournalCorrupt("segment 3 is damaged")
    assert (refused.value.reason, refused.value.metadata["run_id"]) == ("CHECKSUM_MISMATCH", RUN)


async def test_a_part_that_fails_before_it_samples_is_resumed(world):
    """going_on.py 2: whatever the parts before it sampled; what failed later is over."""
    async with world.orchestrator() as runs:
        await completed(world, runs, 3)
        world.trainer.model_missing = True
        assert (await completed(world, runs, 6)).phase == pb.RUN_PHASE_FAILED
        with pytest.raises(QuartetError, match=r"it is FAILED at step 3, .*go on to its 6 steps, then"):
            await runs.submit(RUN, world.toml(steps=9, off_policy=0), dry_run=False)
        world.trainer.model_missing = False
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=6)


@pytest.mark.parametrize("refused", [True, False])
async def test_a_part_that_fails_before_it_samples_keeps_what_was_in_flight(world, monkeypatch, refused):
    """going_on.py 2, training.py 6 and invariant 2: a batch that was closed, and the next one."""
    closed, plain = asyncio.Event(), TrainingRun._still_held

    async def waits(self):
        if self._book.state.step == 2 and not closed.is_set():
            closed.set()
            await self._unless_stopped(asyncio.Event().wait())
        await plain(self)

    monkeypatch.setattr(TrainingRun, "_still_held", waits)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        await closed.wait()
        runs.stop(RUN)
        stopped = await world.rest(runs)
        assert stopped.ledger.in_flight >= 8
        if refused:
            world.trainer.model_missing = True
        else:  # the trainer's run was driven by somebody else meanwhile
            ahead = world.trainer.runs[RUN] = copy.deepcopy(world.trainer.disk[RUN, "closed"])
            ahead.applied = 99
        await runs.resume(RUN)
        failed = await world.rest(runs)
        assert failed.phase == pb.RUN_PHASE_STOPPED and failed.error
        assert failed.ledger == stopped.ledger
        world.trainer.model_missing = False
        world.trainer.forget()
        await runs.resume(RUN)
        run = await world.rest(runs)
        assert_complete(world, run)
        assert not run.ledger.discarded
    async with world.orchestrator() as runs:
        assert runs.status(RUN) == run


async def test_a_fault_of_the_orchestrators_own_loses_nothing(world, monkeypatch):
    """ending.py: a release that has it mended goes on."""
    record_step = training_run.record_step

    async def faulty(book, config, batch, trained):
        if batch == 1:
            raise KeyError("odd")
        await record_step(book, config, batch, trained)

    with monkeypatch.context() as patch:
        patch.setattr(training_run, "record_step", faulty)
        async with world.orchestrator() as runs:
            await runs.submit(RUN, world.toml(), dry_run=False)
            stopped = await world.rest(runs)
    assert stopped.phase == pb.RUN_PHASE_STOPPED and stopped.step == 1 and not stopped.ledger.discarded
    assert "a fault of the orchestrator (KeyError); its log has the details" in stopped.error
    async with world.orchestrator() as runs:
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs))


async def test_the_state_that_a_run_began_with_may_be_gone_once_it_trained(world):
    """docs/runs.md: until then it has to be there."""
    begins = 'initial_state = "/states/first/final@9"\n'
    async with world.orchestrator() as runs:
        await runs.submit(RUN, begins + world.toml(steps=50), dry_run=False)
        for _ in range(2):
            while runs.status(RUN).step == 0:
                await runs.get(RUN).changed()
            runs.stop(RUN)
            assert (await world.rest(runs)).phase == pb.RUN_PHASE_STOPPED
            await runs.resume(RUN)
    checked = [one.spec.initial_state for one in world.trainer.checked]
    assert checked == ["/states/first/final@9", "", ""]


@pytest.mark.parametrize(
    "begins",
    [
        'initial_state = "/states/first/final@9"\ninitial_optimizer = "fresh"\n',
        'lora = { enabled = true, initial_adapter = "/adapters/a" }\n',
    ],
)
async def test_nor_is_the_trainer_asked_again_for_what_else_it_began_with(world, begins):
    async with world.orchestrator() as runs:
        await runs.submit(RUN, begins + world.toml(steps=50), dry_run=False)
        while runs.status(RUN).step == 0:
            await runs.get(RUN).changed()
        runs.stop(RUN)
        await world.rest(runs)
        await runs.resume(RUN)
    first, again = (one.spec for one in world.trainer.checked)
    assert first.fresh_optimizer or first.lora.initial_adapter == "/adapters/a"
    assert not (again.fresh_optimizer or again.initial_state or again.lora.initial_adapter)


async def test_what_cannot_be_written_is_not_gone_on_with(world, monkeypatch):
    """going_on.py 1"""
    async with world.orchestrator() as runs:
        before = await completed(world, runs, 2)

        def full(_fd, _data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(QuartetError, match=r"nothing was changed: .*No space left.*make room") as caught:
            await completed(world, runs, 4)
        assert caught.value.reason == "NOT_READY"
        monkeypatch.undo()
        assert runs.status(RUN) == before
        # Asked for twice at once.
        longer = world.toml(steps=4, off_policy=0)
        both = await asyncio.gather(*(runs.submit(RUN, longer, dry_run=False) for _ in range(2)))
        assert both[0] == both[1]
        assert len([task for task in asyncio.all_tasks() if task.get_name() == f"run-{RUN}"]) == 1
        assert_complete(world, await world.rest(runs), steps=4)


@pytest.mark.parametrize("killed", [True, False])
async def test_the_first_step_after_a_rest_counts_from_where_the_run_went_on(world, monkeypatch, killed):
    """The time in which nothing ran is no step's, whether the run was stopped or its process killed."""
    at = asyncio.Event()
    plain = TrainingRun._still_held

    async def waits(self):
        if self._book.state.step == 2 and not at.is_set():
            # A batch is closed: training it is what is left of the step.
            at.set()
            await self._unless_stopped(asyncio.Event().wait())
        await plain(self)

    monkeypatch.setattr(TrainingRun, "_still_held", waits)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        await at.wait()
        if not killed:
            runs.stop(RUN)
            await world.rest(runs)
    await asyncio.sleep(2.0)
    went_on = time.monotonic()
    async with world.orchestrator() as runs:
        if not killed:
            await runs.resume(RUN)
        await world.rest(runs)
        took_s = time.monotonic() - went_on
        steps = [r.step.metrics for r in await events(runs) if r.WhichOneof("kind") == "step"]
    assert len(steps) == 4
    third = steps[2]
    assert 0 < third["time/step_s"] < took_s and 0 < third["time/train_s"] <= third["time/step_s"]
    assert third["time/wait_rollouts_s"] == 0


async def test_of_a_run_that_rests_only_its_book_stays(world, monkeypatch):
    """execution.py 1"""
    began, make = [], TrainingRun.__init__

    def made(run, *parts):
        began.append(weakref.ref(run))
        make(run, *parts)

    monkeypatch.setattr(TrainingRun, "__init__", made)
    async with world.orchestrator() as runs:
        await completed(world, runs, 2, "completed")
        world.trainer.delay_s = 0.05
        await runs.submit(RUN, world.toml(steps=9), dry_run=False)
        runs.stop(RUN)
        await world.rest(runs)
        async with asyncio.timeout(30.0):
            while any(run() is not None for run in began):
                await asyncio.sleep(0.05)
                gc.collect()
        assert len(began) == 2
        assert (await runs.resume(RUN)).phase == pb.RUN_PHASE_PENDING
        assert_complete(world, await world.rest(runs), steps=9)
