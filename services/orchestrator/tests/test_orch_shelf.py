"""Damaged, foreign and misplaced folders among the runs: one run's trouble is not another's."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import threading
import traceback
from contextlib import AsyncExitStack, suppress

import pytest
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.journal_pb2 import JournalRecord
from quartet_orchestrator import admission, execution, journal, shelf
from quartet_orchestrator.book import Book
from quartet_orchestrator.journal import Journal

write = os.write


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
    """shelf.py 4"""
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


async def test_a_full_disk_stops_the_run_resumable_and_tells_its_followers(world, monkeypatch):
    """Invariant 7: a run whose journal cannot be written is no run to wait for."""
    monkeypatch.setattr(journal, "AGAIN_S", 0.1)
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        await runs.submit("run", world.toml(steps=6), dry_run=False)
        book = runs.get("run")
        while book.state.step < 2:
            await book.changed()

        def full(_fd, _data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        seen = []
        with pytest.raises(QuartetError, match=r"waits for its journal: .*No space left") as caught:
            async with asyncio.timeout(60):
                async for record in book.events(0, rollouts=True):
                    seen.append(record.event)
        assert caught.value.reason == "NOT_READY"
        assert seen == list(range(1, book.journal.last_event + 1))
        monkeypatch.setattr(os, "write", write)
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_STOPPED and "No space left" in run.error
        await runs.resume("run")
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_COMPLETED and run.ledger.trained == 48


async def test_runs_that_are_found_on_a_full_disk_are_stopped_once_there_is_room(world, monkeypatch):
    """runs.py 2 and 5, execution.py 2: none is lost, and whoever asks is told of the disk."""
    monkeypatch.setattr(journal, "AGAIN_S", 0.1)
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        for name, steps in (("run", 6), ("old", 8)):
            await runs.submit(name, world.toml(steps=steps), dry_run=False)
        while runs.get("run").state.step < 2:
            await runs.get("run").changed()
    plain = admission.parse

    def parse(config_toml):
        if "max_steps = 8" in config_toml:
            raise QuartetError("INVALID_CONFIG", "max_steps is not a key", key="max_steps")
        return plain(config_toml)

    def full(_fd, _data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(admission, "parse", parse)
        async with AsyncExitStack() as stack:
            with monkeypatch.context() as filled:
                filled.setattr(os, "write", full)
                runs = await stack.enter_async_context(world.orchestrator())
                for name in ("run", "old"):
                    doing = ""
                    async with asyncio.timeout(60):
                        while "No space left" not in doing:
                            await asyncio.sleep(0.02)
                            doing = runs.status(name).doing
                    said = f"waits for its journal: {world.folder}/runs/{name}/000001.seg cannot be written"
                    assert doing.startswith(said) and "make room there; tried again every 0.1 s" in doing
                said = (
                    r"is (PENDING|TRAINING) and waits for its journal: .*make room there; then it is STOPPED"
                )
                with pytest.raises(QuartetError, match=said):
                    runs.evaluation("old", "num_examples = 1")
            assert (await world.rest(runs)).phase == pb.RUN_PHASE_STOPPED
            assert "No space left" in runs.status("run").error
            assert "refused by this version" in (await world.rest(runs, "old")).error
    async with world.orchestrator() as runs:
        await runs.resume("run")
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_COMPLETED and run.ledger.trained == 48


async def test_a_run_whose_journal_cannot_be_opened_now_goes_on_by_itself_once_it_can(world, monkeypatch):
    """shelf.py 1, runs.py 2: it has not failed, and whoever watches it waits."""
    monkeypatch.setattr(journal, "AGAIN_S", 0.05)
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        await runs.submit("run", world.toml(steps=6), dry_run=False)
        while runs.get("run").state.step < 2:
            await runs.get("run").changed()
    lock = world.folder / "runs" / "run" / "lock"
    lock.unlink()
    lock.mkdir()
    async with world.orchestrator() as runs:
        told = runs.status("run")
        why = f"run 'run' waits: its journal cannot be opened: {lock} cannot be opened: Is a directory"
        assert told.phase == pb.RUN_PHASE_PENDING and told.doing.startswith(why)
        assert [glance.state.phase for glance in runs.glances()] == [pb.RUN_PHASE_PENDING]
        for touch in (
            runs.get,
            runs.stop,
            runs.resume,
            lambda name: runs.submit(name, world.toml(steps=6), dry_run=False),
        ):
            with pytest.raises(QuartetError) as caught:
                result = touch("run")
                await result
            assert caught.value.reason == "NOT_READY" and caught.value.message == told.doing
        lock.rmdir()
        async with asyncio.timeout(60):
            while runs.status("run").doing == told.doing:  # noqa: ASYNC110 - nobody says that it is open
                await asyncio.sleep(0.02)
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_COMPLETED and run.ledger.trained == 48


def in_the_way(world, run_id: str):
    """A folder where the lock of a run's journal should be, for as long as it is there."""
    lock = world.folder / "runs" / run_id / "lock"
    lock.unlink()
    lock.mkdir()
    return lock


async def test_a_run_whose_journal_cannot_be_opened_is_deleted_when_asked(world):
    """claim.py 3, deletion.py 5: what is for good need not be mended first, and no state of it stays."""
    await stopped_runs(world, "run")
    in_the_way(world, "run")
    world.trainer.latest.clear()  # it was started anew: who has the name open there keeps it
    async with world.orchestrator() as runs:
        assert runs.status("run").phase == pb.RUN_PHASE_PENDING
        there = sum(key[0] == "run" for key in world.trainer.disk)
        look = await runs.delete("run", dry_run=True)
        assert look.states == there > 0 and look.journal_bytes > 1000
        assert runs.status("run").phase == pb.RUN_PHASE_PENDING
        assert await runs.delete("run", dry_run=False) == look
        assert runs.all() == [] and not list((world.folder / "runs").iterdir())
        assert not [key for key in world.trainer.disk if key[0] == "run"]


async def test_a_run_that_is_not_read_for_want_of_descriptors_is_not_guessed_at(world, monkeypatch):
    """claim.py 3"""
    await stopped_runs(world, "run")
    lock = in_the_way(world, "run")
    async with world.orchestrator() as runs:
        lock.rmdir()

        def lacking(_path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr("quartet_orchestrator.journal.lock_file", lacking)
        with pytest.raises(
            QuartetError, match=r"was not deleted: .*Too many open files.*mend that"
        ) as caught:
            await runs.delete("run", dry_run=False)
        monkeypatch.undo()
        assert caught.value.reason == "NOT_READY" and (world.folder / "runs" / "run").is_dir()


async def test_a_run_that_is_opened_late_and_not_taken_up_is_told_and_keeps_no_other_from_it(
    world, monkeypatch
):
    """runs.py 2"""
    monkeypatch.setattr(journal, "AGAIN_S", 0.05)
    await stopped_runs(world, "bad", "good")
    locks = [in_the_way(world, name) for name in ("bad", "good")]
    take_up = execution.take_up

    def faulty(held, services, refusal):
        if held.book.state.run_id == "bad":
            raise RuntimeError("odd")
        take_up(held, services, refusal)

    monkeypatch.setattr(execution, "take_up", faulty)
    async with world.orchestrator() as runs:
        for lock in locks:
            lock.rmdir()
        async with asyncio.timeout(60):
            while pb.RUN_PHASE_PENDING in {run.phase for run in runs.all()}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert runs.status("good").phase == pb.RUN_PHASE_STOPPED
        assert "fault of the orchestrator (RuntimeError)" in runs.status("bad").error
        assert not open_in(world.folder / "runs")
    monkeypatch.setattr(execution, "take_up", take_up)
    async with world.orchestrator() as runs:
        assert {run.phase for run in runs.all()} == {pb.RUN_PHASE_STOPPED}


async def test_what_is_closed_opens_no_run_any_more(world, monkeypatch):
    """runs.py 2: nor waits for the others that could not be opened."""
    monkeypatch.setattr(journal, "AGAIN_S", 0.05)
    await stopped_runs(world, "a", "b")
    locks = [in_the_way(world, name) for name in ("a", "b")]
    opened, begun, free = [], threading.Event(), threading.Event()
    open_one = shelf.open_one

    def slow(path):
        opened.append(path.name)
        begun.set()
        free.wait(60)
        return open_one(path)

    async with world.orchestrator() as runs:
        monkeypatch.setattr(shelf, "open_one", slow)
        await asyncio.to_thread(begun.wait)
        for lock in locks:
            lock.rmdir()
        closing = asyncio.create_task(runs.close())
        await asyncio.sleep(0)
        assert runs._closing.is_set()
        free.set()
        await closing
    assert opened == ["a"] and not open_in(world.folder / "runs")


async def test_few_descriptors_keep_no_run_from_being_listed(world):
    """shelf.py 1: however few there are, what opens is open, and of the others it is said why."""
    folder = world.folder / "runs"
    for name in ("a", "b"):
        book = Book(folder / name)
        book.write(submitted={"run_id": name, "config_toml": world.toml()})
        book.write(phase=pb.PhaseEvent(run=pb.Run(run_id=name, phase=pb.RUN_PHASE_PENDING)))
        book.close()
    (world.folder / "runs.lock").touch()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    listed = []
    for few in range(1, 16):
        found, error = None, None
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + few, hard))
        try:
            found = shelf.open_all(folder)
        except OSError as raised:
            error = raised
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if found is not None:
            assert sorted([*found.books, *found.set_aside]) == ["a", "b"]
            assert all("Too many open files" in why.message for why in found.set_aside.values())
            listed.append(len(found.books))
            found.close()
        assert (error is not None) == (few == 1), "one is the lock's, and one reads the folder"
        assert not open_in(world.folder)
    assert listed[0] == 0 and listed[-1] == 2 and 1 in listed


async def test_a_submission_that_finds_no_room_leaves_nothing_and_may_come_again(world, monkeypatch):
    async with world.orchestrator() as runs:

        def full(fd, data):
            return write(fd, data[: len(data) // 2])

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(QuartetError, match=r"cannot be written: it took .* make room there") as caught:
            await runs.submit("run", world.toml(), dry_run=False)
        monkeypatch.undo()
        assert caught.value.reason == "INTERNAL"
        assert runs.all() == [] and not list((world.folder / "runs").iterdir())
        await runs.submit("run", world.toml(), dry_run=False)
        assert (await world.rest(runs, "run")).phase == pb.RUN_PHASE_COMPLETED


async def test_a_submission_that_may_not_survive_a_power_cut_is_told_and_goes_on(world, monkeypatch):
    """It is in the journal, so it exists; once the disk is well again nothing is lacking."""
    async with world.orchestrator() as runs:

        async def broken(_book):
            monkeypatch.undo()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(Book, "settled", broken)
        with pytest.raises(QuartetError, match="accepted, but its journal is not safe on the disk") as caught:
            await runs.submit("run", world.toml(), dry_run=False)
        assert caught.value.reason == "INTERNAL"
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_COMPLETED


async def test_a_stop_that_cannot_be_written_changes_nothing_and_says_why(world, monkeypatch):
    world.trainer.delay_s = 0.2
    async with world.orchestrator() as runs:
        await runs.submit("run", world.toml(steps=6), dry_run=False)

        def full(_fd, _data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(QuartetError, match=r"nothing was changed: .*No space left.*make room") as caught:
            runs.stop("run")
        monkeypatch.undo()
        assert caught.value.reason == "NOT_READY"
        assert runs.stop("run").phase == pb.RUN_PHASE_STOPPING
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_STOPPED
