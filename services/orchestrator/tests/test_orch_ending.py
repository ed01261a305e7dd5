"""How runs end: whatever a kill, or a full disk, leaves of it, the next process finds the same end."""

from __future__ import annotations

import math
import shutil

import pytest
from orch_world import RUN, assert_complete, events
from quartet.errors import QuartetError
from quartet.v1 import journal_pb2 as jpb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator import ending
from quartet_orchestrator.book import Book
from quartet_orchestrator.state import PENDING, RESTING, STOPPED, STOPPING, TRAINING


@pytest.fixture
def moments(world, monkeypatch):
    """Folders with the runs as they were when a run began to write down its end, and after each record."""
    found, write, ended = [], Book.write, ending._ended

    def take():
        found.append(world.folder / f"moment-{len(found)}")
        shutil.copytree(world.folder / "runs", found[-1] / "runs")

    def writes(self, **kind):
        record = write(self, **kind)
        if found:
            take()
        return record

    def ends(book, cause):
        take()
        with monkeypatch.context() as patch:
            patch.setattr(Book, "write", writes)
            ended(book, cause)

    monkeypatch.setattr(ending, "_ended", ends)
    return found


async def found_again(world, folder) -> pb.Run:
    """The run, as an orchestrator leaves it that starts on a copy."""
    world.folder = folder
    async with world.orchestrator() as runs:
        return await world.rest(runs)


async def diverged(world) -> pb.Run:
    """A run that FAILED at its fourth step, with a closed batch and others under way."""
    world.trainer.losses = [0.5, *[math.nan] * 3]
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8, evals=0), dry_run=False)
        run = await world.rest(runs)
        told = (await events(runs))[-1].phase.run
    assert run.phase == pb.RUN_PHASE_FAILED and run.ledger.discarded == {"run_failed": 16}
    assert told == run and not told.ledger.in_flight
    return run


async def test_a_run_that_fails_keeps_its_groups_until_it_is_failed(world, moments, monkeypatch):
    """state.py 5, invariants 1 and 9: else a closed batch is trained whose groups are gone, and the record of
    its step is one that cannot be read again."""
    failed = await diverged(world)
    monkeypatch.undo()
    assert len(moments) >= 2
    for folder in moments[1:]:
        assert await found_again(world, folder) == failed
    # The numbers are finite this time.
    run = await found_again(world, moments[0])
    assert_complete(world, run, steps=8)


@pytest.mark.parametrize("refused", [False, True])
async def test_a_run_that_an_older_release_gave_up_in_part_is_failed(world, moments, monkeypatch, refused):
    """execution.py 2: that release wrote down each group, and then how the run ended."""
    failed = await diverged(world)
    monkeypatch.undo()
    world.folder = moments[0]
    book = Book(world.folder / "runs" / RUN)
    book.write(discarded={"group": min(book.state.groups), "reason": "run_failed"})
    if refused:
        book.write(changed={"config_toml": "odd = 1", "ckpt_interval": 2, "ckpt_keep_last": 2})
    book.close()
    world.trainer.closed.clear()
    for _ in range(2):
        async with world.orchestrator() as runs:
            run = await world.rest(runs)
            assert run.phase == pb.RUN_PHASE_FAILED and run.error == ending.CUT_SHORT
            assert run.ledger == failed.ledger
            with pytest.raises(QuartetError, match="cannot be resumed; submit a new run"):
                await runs.resume(RUN)
    assert world.trainer.closed == [RUN], "and it is told, once"


async def test_a_run_that_an_older_release_stopped_after_it_failed_is_not_resumed(
    world, moments, monkeypatch
):
    """going_on.py 2: what it would train is gone."""
    await diverged(world)
    monkeypatch.undo()
    world.folder = moments[0]
    book = Book(world.folder / "runs" / RUN)
    book.write(discarded={"group": min(book.state.groups), "reason": "run_failed"})
    book.enter(STOPPING)
    book.enter(STOPPED)
    book.close()
    async with world.orchestrator() as runs:
        with pytest.raises(QuartetError, match="is STOPPED and cannot be resumed; submit a new run"):
            await runs.resume(RUN)
        await runs.delete(RUN, dry_run=False)


async def test_why_a_run_stopped_by_itself_outlives_a_kill(world, moments, monkeypatch):
    """ending.py, execution.py 2: between the two records of it."""
    world.host.failing_tasks = set(range(50))
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(evals=0), dry_run=False)
        stopped = await world.rest(runs)
    monkeypatch.undo()
    assert stopped.phase == pb.RUN_PHASE_STOPPED and "ended with nothing to train on" in stopped.error
    assert len(moments) == 3
    for folder in moments[1:]:
        again = await found_again(world, folder)
        assert again.phase == pb.RUN_PHASE_STOPPED and again.error == stopped.error


async def test_why_a_run_is_refused_outlives_a_kill(world, moments, monkeypatch):
    """execution.py 2: one whose configuration a newer release does not take."""
    book = Book(world.folder / "runs" / RUN)
    book.write(submitted={"run_id": RUN, "config_toml": "odd = 1"})
    book.enter(PENDING)
    book.close()
    refused = await found_again(world, world.folder)
    monkeypatch.undo()
    assert refused.phase == pb.RUN_PHASE_STOPPED and "'odd'" in refused.error
    assert len(moments) == 2
    for folder in moments:
        again = await found_again(world, folder)
        assert again.phase == pb.RUN_PHASE_STOPPED and again.error == refused.error


@pytest.mark.parametrize(
    "odd",
    [
        {"dispatched": {"group": 7, "members": 1}},
        {"rollout": {"group": 0, "rollout": {"member": 0}}},
        {"discarded": {"group": 1, "reason": "stale"}},
        {"acked": {"group": 1}},
        {"call": {"seq_id": 2}},
        {"step": {"step": 2}},
        {"step": {"step": 1}},
        {"phase": {"run": {"phase": PENDING}}},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_what_does_not_follow_is_not_written_down(tmp_path, odd):
    """state.py 1, book.py 1: a fault of ours costs a run its process, and not its journal."""
    book = Book(tmp_path)
    book.write(submitted={"run_id": RUN})
    book.enter(PENDING)
    book.enter(TRAINING)
    for group in range(2):
        book.write(dispatched={"group": group, "members": 1, "place": group})
    book.write(rollout={"group": 0, "rollout": {"member": 0}})
    book.write(batch={"batch": 0, "groups": [0, 1]})
    book.write(discarded={"group": 1, "reason": "run_failed"})
    before, state = book.journal.last_number, book.state.to_proto(0)
    with pytest.raises(AssertionError):
        book.write(**odd)
    with pytest.raises(AssertionError):
        book.state.apply(jpb.JournalRecord(**odd))
    assert book.journal.last_number == before and book.state.to_proto(0) == state
    assert book.state.phase not in RESTING and not book.state.groups[0].missing
    book.close()
    again = Book(tmp_path)
    assert again.state == book.state
    again.close()
