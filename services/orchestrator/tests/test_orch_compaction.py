"""What the journal gives up, and that nobody misses it."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orch_world import until
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator import training
from quartet_orchestrator.book import Book
from quartet_orchestrator.calls import CallKind, CallPlan
from quartet_orchestrator.compaction import Compaction
from quartet_orchestrator.journal import Journal
from quartet_orchestrator.segments import Segments
from quartet_orchestrator.state import RESTING


@pytest.fixture
def small_segments(monkeypatch):
    """About one batch of the fake world in each."""
    monkeypatch.setattr(Journal.__init__, "__defaults__", (1500,))


def rollouts(records):
    for record in records:
        match record.WhichOneof("kind"):
            case "rollout":
                yield record.rollout
            case "eval_rollout":
                yield record.eval_rollout.rollout


@given(
    st.integers(1, 30),
    st.sets(st.integers(1, 30)),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 2),
    st.data(),
)
def test_covered_steps_are_in_each_of_the_newest_states(max_steps, ends, interval, keep_last, every, data):
    earlier = sorted(end for end in ends if end < max_steps)
    plan = CallPlan(
        max_steps=max_steps,
        earlier_ends=earlier,
        save_interval=interval,
        keep_last=keep_last,
        keep_interval=every * interval,
    )
    applied = data.draw(st.integers(0, plan.last_of(max_steps - 1) - 1))
    states = {}
    for call in map(plan.call, range(1, applied + 1)):
        if call.kind is CallKind.SAVE:
            # As the trainer's states.py has it, but for those that are kept beside the newest.
            states.pop(call.state_name, None)
            states[call.state_name] = call.batch + 1
            states = dict(list(states.items())[-keep_last:])
    covered = plan.covered_steps(applied)
    assert covered == (min(states.values()) if len(states) >= keep_last else 0)


def test_what_is_covered_is_counted_as_far_as_the_run_has_come():
    """A run that goes on until somebody stops it has as many steps as can be counted."""
    plan = CallPlan(max_steps=2**32 - 1, earlier_ends=(7,), save_interval=5, keep_last=3)
    assert [plan.covered_steps(plan.last_of(steps - 1)) for steps in (5, 7, 9, 10, 12)] == [0, 0, 0, 5, 5]


async def test_old_rollouts_are_given_up_and_nothing_else(world, small_segments):
    """Invariant 8: the journal's size is bounded; followers still see every event.

    compaction.py 1 and 2
    """
    async with world.orchestrator() as runs:
        await runs.submit("whole", world.toml(steps=12), dry_run=False)
        await world.rest(runs, "whole")
        whole = runs.get("whole").journal
        whole_records = [r async for r in runs.get("whole").events(0, rollouts=True)]
        whole_bytes = whole.size_bytes()
    world.journal_keep_bytes = 0
    async with world.orchestrator() as runs:
        await runs.submit("run", world.toml(steps=12), dry_run=False)
        run = await world.rest(runs)
        book = runs.get("run")
        records = [r async for r in book.events(0, rollouts=True)]
        assert run.phase == pb.RUN_PHASE_COMPLETED, run.error
        assert book.journal.size_bytes() < whole_bytes
        state = book.state
    assert [r.event for r in records] == list(range(1, run.last_event + 1))
    assert len(records) == len(whole_records)
    # Saved after steps 2, 4, ..., 10; two states are kept, so steps 1 to 8 are covered by both.
    slim = [event for event in rollouts(records) if not event.rollout.samples]
    assert {event.step for event in slim if event.HasField("step")} <= set(range(1, 9))
    assert len(slim) > 40
    assert all(event.rollout.rewards and event.rollout.usage.completion_tokens for event in slim)
    assert not any(event.rollout.messages or event.rollout.task_json for event in slim)
    told = [event for event in rollouts(whole_records) if event.rollout.task_json]
    assert told and all(event.rollout.member == 0 for event in told), "the others have no messages"
    async with world.orchestrator() as runs:
        assert runs.get("run").state == state
        assert [r async for r in runs.get("run").events(0, rollouts=True)] == records
    for path in (world.folder / "runs" / "run").glob("index.sqlite*"):
        path.unlink()
    async with world.orchestrator() as runs:
        assert runs.get("run").state == state
        assert [r async for r in runs.get("run").events(0, rollouts=True)] == records


async def test_nobody_asks_what_is_covered_while_the_journal_is_within_its_size(world, monkeypatch):
    """compaction.py 1; of a long run that takes a good part of a second, after each of its steps."""
    monkeypatch.setattr(CallPlan, "covered_steps", None)
    async with world.orchestrator() as runs:
        await runs.submit("run", world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_COMPLETED, run.error


@pytest.mark.parametrize("seed", range(3))
async def test_replays_never_miss_what_was_given_up(world, small_segments, monkeypatch, seed):
    """Invariants 2 and 9, with trainer and orchestrator killed while the journal is compacted.

    compaction.py 3
    """
    print(f"seed {seed}")
    chance = random.Random(seed)
    monkeypatch.setattr(training, "GUARD_S", 0.05)
    async with world.orchestrator() as runs:
        await runs.submit("run", world.toml(steps=12, off_policy=0), dry_run=False)
        await world.rest(runs)
    undisturbed = world.trainer.disk["run", "final"].weights
    for memory in (world.trainer.runs, world.trainer.disk, world.trainer.latest):
        memory.clear()
    world.folder, world.journal_keep_bytes, world.trainer.delay_s = world.folder / "again", 0, 0.01
    seen, run, lives = [], pb.Run(), 0
    while run.phase not in RESTING:
        lives += 1
        async with world.orchestrator() as runs:
            run = await runs.submit("run", world.toml(steps=12, off_policy=0), dry_run=False)
            with suppress(TimeoutError):
                # Ever longer ones: a busy machine has to get somewhere in the end.
                run = await world.rest(runs, timeout_s=chance.uniform(0.05, 0.4) * (1 + lives / 10))
            seen += [r.event for r in runs.get("run").journal.events(len(seen), 100_000, rollouts=True)]
        if chance.random() < 0.5:
            await world.kill("trainer")
            await world.serve("trainer")
    assert run.phase == pb.RUN_PHASE_COMPLETED, run.error
    assert world.trainer.disk["run", "final"].weights == undisturbed
    assert seen == list(range(1, run.last_event + 1))
    journal = Journal(world.folder / "runs" / "run")
    assert any(not event.rollout.samples for event in rollouts(journal.events(0, 100_000, rollouts=True)))
    journal.close()


async def test_a_journal_that_saved_states_hold_beyond_its_size_is_told_of_once(world, small_segments):
    """compaction.py 5: the disk is the next bound."""
    world.journal_keep_bytes = 1
    async with world.orchestrator() as runs:
        await runs.submit("run", world.toml(steps=6), dry_run=False)
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_COMPLETED
        events = [one async for one in runs.get("run").events(0, rollouts=False)]
    told = [one.note.message for one in events if "journal_keep_bytes" in one.note.message]
    assert len(told) == 1 and "each of the ckpt.keep_last newest states" in told[0]


async def test_of_a_journal_of_which_no_segment_is_held_back_nothing_is_told(tmp_path):
    """compaction.py 5: one segment is open, however small the bound is."""
    book = Book(tmp_path / "run")
    try:
        book.write(note=pb.NoteEvent(message="one"))
        await Compaction(book, lambda: 0, 1).run()
        assert [one.note.message for one in book.journal.events(0, 9, rollouts=False)] == ["one"]
    finally:
        book.close()


async def test_a_trainer_that_lost_all_states_is_told_what_is_missing(world, small_segments, monkeypatch):
    monkeypatch.setattr(training, "GUARD_S", 0.05)
    world.journal_keep_bytes, world.trainer.delay_s = 0, 0.01
    async with world.orchestrator() as runs:
        await runs.submit("run", world.toml(steps=12), dry_run=False)
        while runs.get("run").state.step < 8:
            await runs.get("run").changed()
        saved = dict(world.trainer.disk)
        world.trainer.disk.clear()
        world.trainer.forget()
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_STOPPED
        assert "before step 1, whose rollouts were given up (journal_keep_bytes)" in run.error
        world.trainer.forget()
        world.trainer.disk.update(saved)
        await runs.resume("run")
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_COMPLETED and run.ledger.trained == 96


async def test_a_kill_between_the_index_and_the_file_is_mended(world, small_segments, monkeypatch):
    """compaction.py 4"""
    async with world.orchestrator() as runs:
        await runs.submit("run", world.toml(steps=6), dry_run=False)
        await world.rest(runs)
        records = [r async for r in runs.get("run").events(0, rollouts=True)]

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    def halved(record):
        for event in rollouts([record]):
            event.rollout.ClearField("messages")
            event.rollout.ClearField("samples")
        return record

    journal = Journal(world.folder / "runs" / "run")
    monkeypatch.setattr(Segments, "replace", killed)
    with pytest.raises(Killed):
        journal.swap(journal.compact(journal.uncompacted()[0], halved))
    journal.close()
    async with world.orchestrator() as runs:
        assert [r async for r in runs.get("run").events(0, rollouts=True)] == records
        assert not list((world.folder / "runs" / "run").glob("*.rewritten"))


async def test_a_compaction_that_nobody_waits_for_leaves_no_file(tmp_path, monkeypatch, small_segments):
    """compaction.py: on a disk that is over its limit already."""
    book = Book(tmp_path / "run")
    try:
        for number in range(100):
            book.write(note=pb.NoteEvent(message=f"note {number}"))
        begun, go_on, made = asyncio.Event(), threading.Event(), []
        loop, compact = asyncio.get_running_loop(), book.journal.compact

        def slow(*args):
            made.append(compact(*args))
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(60)
            return made[0]

        monkeypatch.setattr(book.journal, "compact", slow)
        compacting = asyncio.create_task(Compaction(book, lambda: 0, 0).run())
        await begun.wait()
        assert made[0].file.exists()
        compacting.cancel()
        await asyncio.gather(compacting, return_exceptions=True)
        assert made[0].file.exists(), "its thread is at it"
        go_on.set()
        await until(lambda: not made[0].file.exists())
    finally:
        book.close()


def test_a_swap_that_fails_leaves_everything_as_it_was(tmp_path, monkeypatch):
    """segments.py 5, index.py 2"""
    from quartet.v1.journal_pb2 import JournalRecord

    journal = Journal(tmp_path, 300)
    for number in range(30):
        journal.append(JournalRecord(note=pb.NoteEvent(message=f"note {number}" * 3)))
    before = journal.events(0, 100, rollouts=True)

    def shorter(record):
        record.note.message = "short"
        return record

    def full(*_):
        raise OSError("no space left")

    class FullIndex:
        """As SQLite is on a full disk: it ends the transaction by itself."""

        def __init__(self, index):
            self._index = index

        def __getattr__(self, name):
            return getattr(self._index, name)

        def executemany(self, *_):
            self._index.execute("ROLLBACK")
            raise sqlite3.OperationalError("no space left")

    for what, name, refuses in ((Segments, "replace", full), (journal, "_index", FullIndex(journal._index))):
        with monkeypatch.context() as patched:
            patched.setattr(what, name, refuses)
            with pytest.raises(OSError, match="no space left"):
                journal.swap(journal.compact(1, shorter))
        assert journal.events(0, 100, rollouts=True) == before
        assert not list(tmp_path.glob("*.rewritten")), "every step would leave another one"
    journal.swap(journal.compact(1, shorter))
    after = journal.events(0, 100, rollouts=True)
    assert [r.event for r in after] == [r.event for r in before] and after[0].note.message == "short"
    journal.close()
