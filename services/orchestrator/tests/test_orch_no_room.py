"""Runs whose journal has no room, or cannot be opened for now: they wait, and nothing of them is lost."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import tempfile
import threading
from contextlib import AsyncExitStack

import pytest
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator import admission, execution, journal, shelf
from quartet_orchestrator.__main__ import check_data_dir
from quartet_orchestrator.book import Book
from test_orch_shelf import open_in, stopped_runs

write = os.write


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


def test_an_orchestrator_starts_on_a_full_disk_and_nowhere_else_that_takes_no_files(tmp_path, monkeypatch):
    """Else nobody could delete a run to make room."""

    def refuses(error):
        def file(**_):
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(tempfile, "TemporaryFile", file)

    for full in (errno.ENOSPC, errno.EDQUOT):
        refuses(full)
        check_data_dir(tmp_path)
    refuses(errno.EACCES)
    with pytest.raises(ConfigError, match="takes no files"):
        check_data_dir(tmp_path)


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
        assert runs._set_aside._closing.is_set()
        free.set()
        await closing
    assert opened == ["b"] and not open_in(world.folder / "runs")


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
