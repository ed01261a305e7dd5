"""Damaged, foreign and misplaced folders among the runs: one run's trouble is not another's."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import traceback
from contextlib import suppress

import pytest
from orch_world import until
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.folder import lock_file
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.journal_pb2 import JournalRecord
from quartet_orchestrator import admission, execution, journal, shelf
from quartet_orchestrator.book import Book
from quartet_orchestrator.journal import Journal


async def stopped_runs(world, *names: str) -> None:
    """Runs that are stopped in the middle, and the files of a closed orchestrator."""
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        for name in names:
            await runs.submit(name, world.toml(steps=6), dry_run=False)
        for name in names:
            while runs.get(name).state.step < 2:
                await runs.get(name).changed()
            runs.stop(name)
            await world.rest(runs, name)


def damage(world, name: str) -> bytes:
    """Flips a bit in the middle of a run's only segment."""
    path = world.folder / "runs" / name / "000001.seg"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return bytes(data)


async def test_a_new_run_is_found_after_a_power_cut(world, monkeypatch):
    """SubmitRun answers when it is: its folder's name is on the disk, too."""
    synced, fsync = [], os.fsync

    def sync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    async with world.orchestrator() as runs:
        await runs.submit("new", world.toml(evals=0), dry_run=False)
        assert str(world.folder / "runs") in synced
        await world.rest(runs, run_id="new")


async def test_old_runs_are_read_after_the_others_have_gone_on(world, monkeypatch):
    """shelf.py 4, set_aside.py 1, runs.py 2: what was written last goes on at once."""
    await stopped_runs(world, "bad", "old", "unfinished")
    async with world.orchestrator() as runs:
        await runs.resume("unfinished")
        await runs.resume("old")
        assert (await world.rest(runs, "old")).phase == pb.RUN_PHASE_COMPLETED
    for seconds, name in enumerate(("unfinished", "bad", "old")):
        for path in (world.folder / "runs" / name).iterdir():
            os.utime(path, (seconds, seconds))
    damage(world, "bad")
    os.utime(world.folder / "runs" / "bad" / "000001.seg", (1, 1))
    monkeypatch.setattr(shelf, "READ_S", -1)
    async with world.orchestrator() as runs:
        assert runs.status("old").phase == pb.RUN_PHASE_COMPLETED, "the newest is read in any case"
        for name in ("bad", "unfinished"):
            told = runs.status(name)
            assert told.phase == pb.RUN_PHASE_PENDING and told.doing.startswith(f"run {name!r} waits: ")
            with pytest.raises(QuartetError, match="is read after those") as caught:
                await runs.delete(name, dry_run=True)
            assert caught.value.reason == "NOT_READY"
            with pytest.raises(QuartetError, match="is read after those"):
                runs.keeper_of(name)
        async with asyncio.timeout(60):
            while any("is read" in run.doing for run in runs.all()):  # noqa: ASYNC110 - nobody says it
                await asyncio.sleep(0.01)
        assert (await world.rest(runs, "unfinished")).phase == pb.RUN_PHASE_COMPLETED
        assert "bad frame" in runs.status("bad").error
        assert (await runs.delete("bad", dry_run=False)).journal_bytes > 0
        assert "bad" not in [run.run_id for run in runs.all()]


async def test_who_looks_at_an_unread_run_or_a_fault_that_one_meets_is_not_the_others_trouble(
    world, monkeypatch
):
    """set_aside.py 1 and 2: nobody knows that it rests before it is read; and the others are read."""
    await stopped_runs(world, "newest", "looked_at", "faulty")
    for seconds, name in enumerate(("faulty", "looked_at", "newest")):
        for path in (world.folder / "runs" / name).iterdir():
            os.utime(path, (seconds, seconds))
    opened = shelf.open_one

    def open_one(path):
        if path.name == "faulty":
            raise ZeroDivisionError
        return opened(path)

    monkeypatch.setattr(shelf, "open_one", open_one)
    monkeypatch.setattr(shelf, "READ_S", -1)
    monkeypatch.setattr(journal, "AGAIN_S", 0.01)
    with lock_file(world.folder / "runs" / "looked_at" / "lock") as somebody:
        async with world.orchestrator() as runs:
            await until(lambda: runs.status("faulty").phase == pb.RUN_PHASE_FAILED)
            assert "a fault of the orchestrator (ZeroDivisionError)" in runs.status("faulty").error
            with pytest.raises(QuartetError, match="is read after those") as caught:
                await runs.delete("looked_at", dry_run=False)
            assert caught.value.reason == "NOT_READY"
            somebody.close()
            await until(lambda: runs.status("looked_at").phase == pb.RUN_PHASE_STOPPED)
            assert (await runs.delete("looked_at", dry_run=False)).journal_bytes > 0


async def test_a_damaged_journal_is_listed_and_the_other_runs_go_on(world):
    """runs.py 2, shelf.py 1"""
    await stopped_runs(world, "bad", "good")
    data = damage(world, "bad")
    async with world.orchestrator() as runs:
        await runs.resume("good")
        assert (await world.rest(runs, "good")).phase == pb.RUN_PHASE_COMPLETED
        assert {run.run_id: run.phase for run in runs.all()} == {
            "bad": pb.RUN_PHASE_FAILED,
            "good": pb.RUN_PHASE_COMPLETED,
        }
        error = runs.status("bad").error
        assert "'bad' is set aside" in error and "bad frame at byte" in error and "restore" in error
        assert runs.stop("bad").phase == pb.RUN_PHASE_FAILED
        for touch in (
            runs.get,
            runs.resume,
            lambda name: runs.submit(name, world.toml(steps=6), dry_run=False),
        ):
            with pytest.raises(QuartetError) as caught:
                result = touch("bad")
                await result
            assert caught.value.reason == "CHECKSUM_MISMATCH" and caught.value.message == error
            depth = len(traceback.extract_tb(caught.value.__traceback__))
            assert depth <= 4, "one error that is raised again collects tracebacks"
    assert (world.folder / "runs/bad/000001.seg").read_bytes() == data


async def test_a_restored_journal_goes_on(world):
    await stopped_runs(world, "run")
    folder = world.folder / "runs" / "run"
    shutil.copytree(folder, world.folder / "kept")
    damage(world, "run")
    async with world.orchestrator() as runs:
        assert runs.status("run").phase == pb.RUN_PHASE_FAILED
    shutil.rmtree(folder)
    shutil.copytree(world.folder / "kept", folder)
    async with world.orchestrator() as runs:
        await runs.resume("run")
        assert (await world.rest(runs, "run")).phase == pb.RUN_PHASE_COMPLETED


async def test_a_configuration_that_is_refused_now_stops_its_run_only(world, monkeypatch):
    """runs.py 2"""
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        for name, steps in (("old", 8), ("new", 4)):
            await runs.submit(name, world.toml(steps=steps), dry_run=False)
    plain = admission.parse

    def parse(config_toml):
        if "max_steps = 8" in config_toml:
            raise QuartetError("INVALID_CONFIG", "max_steps is not a key", key="max_steps")
        return plain(config_toml)

    monkeypatch.setattr(admission, "parse", parse)
    async with world.orchestrator() as runs:
        assert (await world.rest(runs, "new")).phase == pb.RUN_PHASE_COMPLETED
        old = runs.status("old")
        assert old.phase == pb.RUN_PHASE_STOPPED
        assert "refused by this version" in old.error and "max_steps is not a key" in old.error
        with pytest.raises(QuartetError) as caught:
            await runs.resume("old")
        assert caught.value.reason == "INVALID_CONFIG"
        assert runs.status("old").phase == pb.RUN_PHASE_STOPPED
    monkeypatch.undo()
    async with world.orchestrator() as runs:
        await runs.resume("old")
        assert (await world.rest(runs, "old")).phase == pb.RUN_PHASE_COMPLETED


async def test_a_run_that_a_fault_meets_when_it_is_taken_up_keeps_no_other_from_going_on(world, monkeypatch):
    """runs.py 2: nor the orchestrator from starting."""
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        for name in ("bad", "good"):
            await runs.submit(name, world.toml(steps=6), dry_run=False)
            while runs.get(name).state.step < 1:
                await runs.get(name).changed()
    take_up = execution.take_up

    def faulty(held, services, refusal):
        if held.book.state.run_id == "bad":
            raise RuntimeError("odd")
        take_up(held, services, refusal)

    monkeypatch.setattr(execution, "take_up", faulty)
    async with world.orchestrator() as runs:
        assert (await world.rest(runs, "good")).phase == pb.RUN_PHASE_COMPLETED
        bad = runs.status("bad")
        assert bad.phase == pb.RUN_PHASE_FAILED and "fault of the orchestrator (RuntimeError)" in bad.error
        assert not open_in(world.folder / "runs" / "bad")
    monkeypatch.undo()
    async with world.orchestrator() as runs:
        assert (await world.rest(runs, "bad")).phase == pb.RUN_PHASE_COMPLETED


@pytest.mark.parametrize(
    ("records", "at"),
    [
        ([{"call": {"seq_id": 7}}], 2),
        ([{"acked": {"group": 7}}], 2),
        ([{"dispatched": {"members": 2}}, *[{"rollout": {"rollout": {"member": 1}}}] * 2, {"note": {}}], 4),
    ],
)
async def test_records_that_do_not_follow_are_damage(world, records, at):
    book = Book(world.folder / "runs" / "odd")
    book.write(submitted={"run_id": "odd", "config_toml": world.toml()})
    for record in records:
        book.journal.append(JournalRecord(**record))
    book.close()
    async with world.orchestrator() as runs:
        assert f"record {at} does not follow" in runs.status("odd").error


async def test_folders_that_are_no_runs_are_left_alone(world):
    """shelf.py 2"""
    kept = world.folder / "runs" / "backup" / "run-1"
    kept.mkdir(parents=True)
    (kept / "000001.seg").write_bytes(b"precious")
    async with world.orchestrator() as runs:
        assert runs.all() == []
    assert (kept / "000001.seg").read_bytes() == b"precious"
    assert [path.name for path in kept.parent.iterdir()] == ["run-1"]


async def test_an_aborted_submission_is_removed_but_nothing_else_in_its_folder(world):
    """shelf.py 2"""
    for name in ("empty", "shared"):
        Book(world.folder / "runs" / name).close()
    note = world.folder / "runs" / "shared" / "note.txt"
    note.write_text("mine")
    async with world.orchestrator() as runs:
        assert runs.all() == []
        assert [path.name for path in (world.folder / "runs").iterdir()] == ["shared"]
        assert [path.name for path in note.parent.iterdir()] == ["note.txt"]
        await runs.submit("shared", world.toml(), dry_run=False)


async def test_a_copy_of_a_run_beside_it_is_set_aside(world):
    """shelf.py 3"""
    await stopped_runs(world, "run")
    shutil.copytree(world.folder / "runs" / "run", world.folder / "runs" / "run-copy")
    async with world.orchestrator() as runs:
        assert "holds the run 'run' under another name" in runs.status("run-copy").error
        await runs.resume("run")
        assert (await world.rest(runs, "run")).phase == pb.RUN_PHASE_COMPLETED


async def test_two_orchestrators_on_one_folder_are_refused(world):
    """shelf.py 5"""
    await stopped_runs(world, "a", "run")
    async with world.orchestrator():
        services = world.services()
        second = world.runs(services)
        with pytest.raises(ConfigError, match=r"data_dir is in use: .*held by another orchestrator"):
            second.start()
        await services.close()
    # A book may be held by somebody who does not have the shelf.
    book = Book(world.folder / "runs" / "a")
    await book.opened()
    with pytest.raises(ConfigError, match=r"data_dir is in use: .*held by another orchestrator"):
        async with world.orchestrator():
            pass
    book.close()


def open_in(folder):
    """The files of a folder that this process has open."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [link for link in links if link.startswith(f"{folder}/")]


async def test_runs_that_rest_hold_no_descriptors(world):
    """book.py 4, journal.py 5: what was is not bounded by open files."""
    folder = world.folder / "runs"
    async with world.orchestrator() as runs:
        for run_id in ("a", "b"):
            await runs.submit(run_id, world.toml(), dry_run=False)
            await world.rest(runs, run_id)
        await runs.submit("stopped", world.toml(steps=6), dry_run=False)
        assert open_in(folder / "stopped")
        runs.stop("stopped")
        await world.rest(runs, "stopped")
        await asyncio.sleep(0)
        assert not open_in(folder)
    async with world.orchestrator() as runs:
        assert not open_in(folder)
        followers = [runs.get("a").events(0, rollouts=True) for _ in range(2)]
        first = [await anext(follower) for follower in followers]
        assert first[0] == first[1] and open_in(folder / "a")
        seen = [[record.event async for record in follower] for follower in followers]
        assert seen[0] == seen[1] == list(range(2, runs.status("a").last_event + 1))
        assert not open_in(folder)
        await runs.resume("stopped")
        assert (await world.rest(runs, "stopped")).phase == pb.RUN_PHASE_COMPLETED
        await asyncio.sleep(0)
        assert not open_in(folder)


async def test_a_resume_that_came_to_nothing_leaves_nothing_open(world, monkeypatch):
    """book.py 4"""
    await stopped_runs(world, "run")
    folder, free, begun = world.folder / "runs", threading.Event(), threading.Event()
    wake = Journal.wake

    def full(_fd, _data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def slow(journal):
        begun.set()
        free.wait()
        wake(journal)
        begun.clear()

    async with world.orchestrator() as runs:
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            with pytest.raises(QuartetError, match="nothing was changed"):
                await runs.resume("run")
            assert not open_in(folder)
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "wake", slow)
            resuming = asyncio.create_task(runs.resume("run"))
            await asyncio.to_thread(begun.wait)
            resuming.cancel()
            await asyncio.gather(resuming, return_exceptions=True)
            free.set()
            async with asyncio.timeout(60):
                while begun.is_set() or open_in(folder):  # noqa: ASYNC110 - a thread has no event for it
                    await asyncio.sleep(0.005)
        assert runs.status("run").phase == pb.RUN_PHASE_STOPPED
        await runs.resume("run")
        assert (await world.rest(runs, "run")).phase == pb.RUN_PHASE_COMPLETED


async def test_a_closed_journal_is_opened_by_nobody(world):
    """journal.py 5: a thread that comes late does not take the lock from the next process."""
    async with world.orchestrator() as runs:
        await runs.submit("run", world.toml(steps=1), dry_run=False)
        await world.rest(runs)
        journal = runs.get("run").journal
    with pytest.raises(OSError, match="is closed"):
        journal.select("step")
    assert not open_in(world.folder / "runs")
