"""The index of a journal under damage: a cache, which costs nobody a run."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from orch_world import until
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.journal_pb2 import JournalRecord
from quartet_orchestrator import index
from quartet_orchestrator.book import Book
from quartet_orchestrator.journal import Journal
from structlog.testing import capture_logs


def fill(folder: Path) -> list[JournalRecord]:
    """Notes, and every third record a group."""
    journal = Journal(folder)
    written = []
    for number in range(40):
        if number % 3 == 2:
            record = JournalRecord(dispatched={"group": number, "batch": number // 6, "members": 2})
        else:
            record = JournalRecord(note=pb.NoteEvent(message=f"note {number}"))
        written.append(journal.append(record))
    journal.close()
    return written


def damage(folder: Path, tree: str) -> None:
    """Fills the root page of a table or index of the index with what is none."""
    index = sqlite3.connect(folder / "index.sqlite")
    (page,) = index.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (tree,)).fetchone()
    (size,) = index.execute("PRAGMA page_size").fetchone()
    index.close()
    with (folder / "index.sqlite").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)


def test_an_index_that_is_damaged_inside_is_rebuilt(tmp_path):
    """index.py 1"""
    written = fill(tmp_path)
    damage(tmp_path, "records")
    journal = Journal(tmp_path)
    assert [*journal.without_rollouts()] == written
    journal.close()


@pytest.mark.parametrize(
    ("tree", "read"),
    [
        ("by_group", lambda journal: journal.select("dispatched", group=8)),
        ("by_step_and_group", lambda journal: journal.select("dispatched", step=2)[:1]),
        ("by_event", lambda journal: journal.events(5, 1, rollouts=True)),
    ],
)
def test_an_index_whose_damage_is_met_later_is_rebuilt_when_it_is_opened_next(
    tmp_path, monkeypatch, tree, read
):
    """journal.py 3: whoever meets it gets OSError."""
    written = fill(tmp_path)
    damage(tmp_path, tree)
    with monkeypatch.context() as later:
        later.setattr(index, "_is_whole", lambda rows: True)  # as where it came after that look
        journal = Journal(tmp_path)
    with pytest.raises(OSError, match=r"^the index of .* cannot be read: database disk image is malformed"):
        read(journal)
    journal.rest()
    assert read(journal) == [written[7 if tree == "by_event" else 8]]
    journal.close()


@pytest.mark.parametrize(
    "wrong",
    [
        "DELETE FROM records WHERE number BETWEEN 8 AND 9",
        "DELETE FROM records WHERE number = 1",
        "UPDATE records SET offset = offset + 1 WHERE number = 9",
        "UPDATE records SET length = length - 1 WHERE number = 9",
        "UPDATE records SET segment = 'one' WHERE number = 9",
    ],
)
def test_an_index_that_misses_a_record_or_has_it_elsewhere_is_rebuilt(tmp_path, wrong):
    """index.py 4"""
    written = fill(tmp_path)
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as rows:
        rows.execute(wrong)
        rows.commit()
    journal = Journal(tmp_path)
    assert [*journal.without_rollouts()] == written
    assert journal.select("dispatched", group=8) == [written[8]]
    journal.close()


async def test_a_journal_that_a_thread_is_at_rests_when_that_is_done(tmp_path):
    """journal.py, book.py 4: the event loop does not wait for it."""
    book = Book(tmp_path / "run")
    book.note("one record")
    book.state.phase = pb.RUN_PHASE_STOPPED
    reading, go_on = threading.Event(), threading.Event()

    def read():
        with book.journal._using():
            reading.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(60)
    book.rest_if_idle()
    assert book.journal.is_open, "somebody is at it"
    go_on.set()
    await until(lambda: not book.journal.is_open)
    thread.join()
    book.close()


def test_what_a_runs_state_is_folded_from_is_read_as_everything_else_is(tmp_path):
    """journal.py 3 and 5"""
    written = fill(tmp_path)
    journal = Journal(tmp_path)
    journal.rest()
    assert [*journal.without_rollouts()] == written, "it is opened again"
    reading = journal.without_rollouts()
    assert next(reading) == written[0]
    journal.rest()
    assert [*reading] == written[1:]
    journal._index.set_progress_handler(lambda: 1, 1)
    with pytest.raises(OSError, match=r"^the index of .* cannot be read: interrupted"):
        journal.without_rollouts()
    journal.close()
    with pytest.raises(OSError, match="is closed"):
        journal.without_rollouts()


def test_a_power_cut_takes_no_more_of_an_index_than_its_end(tmp_path):
    """index.py 1: SQLite promises that of a write-ahead log from NORMAL (1) on."""
    journal = Journal(tmp_path)
    assert journal._index.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert journal._index.execute("PRAGMA synchronous").fetchone() == (1,)
    journal.close()


@pytest.mark.parametrize("fault", ["index", "segment"])
async def test_what_is_wrong_in_the_folder_of_a_run_keeps_no_other_from_going_on(world, fault):
    """runs.py 2, shelf.py 1: nor that one, once it is mended, which an index is at once, by itself."""
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        for name in ("bad", "good"):
            await runs.submit(name, world.toml(steps=6), dry_run=False)
        for name in ("bad", "good"):
            while runs.get(name).state.step < 2:
                await runs.get(name).changed()
            runs.stop(name)
            await world.rest(runs, name)
        assert runs.get("bad").state.groups, "which are read at the start"
    folder = world.folder / "runs" / "bad"
    added = folder / "000001 (copy).seg"
    if fault == "index":
        damage(folder, "by_group")
    else:
        shutil.copy(folder / "000001.seg", added)
    async with world.orchestrator() as runs:
        bad = runs.status("bad")
        if fault == "index":
            assert bad.phase == pb.RUN_PHASE_STOPPED and not bad.doing
        else:
            assert "is set aside" in bad.error
        await runs.resume("good")
        assert (await world.rest(runs, "good")).phase == pb.RUN_PHASE_COMPLETED
    added.unlink(missing_ok=True)
    async with world.orchestrator() as runs:
        await runs.resume("bad")
        assert (await world.rest(runs, "bad")).phase == pb.RUN_PHASE_COMPLETED


@contextmanager
def without_room() -> Iterator[None]:
    """No file gets longer, and none is begun."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def without_its_log(folder: Path) -> Iterator[None]:
    """SQLite can make no log beside the index in the folder, as where there is no descriptor for it."""
    (folder / "index.sqlite-wal").mkdir()
    yield
    (folder / "index.sqlite-wal").rmdir()


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("fault", ["room", "log"])
def test_an_index_that_its_disk_does_not_take_stays_as_it_is_and_the_journal_is_read(
    tmp_path, fault, lacking
):
    """index.py 1, journal.py 3: what is written then is found by the index that there is later."""
    written = fill(tmp_path)
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as rows, rows:
        rows.execute("DELETE FROM records WHERE number > ?", (40 - lacking,))
    before = (tmp_path / "index.sqlite").read_bytes()
    with capture_logs() as logged, without_room() if fault == "room" else without_its_log(tmp_path):
        journal = Journal(tmp_path)
        assert [*journal.without_rollouts()] == written
        if fault == "room":
            with pytest.raises(OSError, match=r"cannot be written: File too large; raise .*ulimit -f"):
                journal.append(JournalRecord(note={}))
        else:
            written.append(journal.append(JournalRecord(note={})))
        journal.close()
    in_memory = [str(one["folder"]) for one in logged if one["event"] == "index_in_memory"]
    assert in_memory == ([str(tmp_path)] if lacking or fault == "log" else []), "a whole one is read as it is"
    assert (tmp_path / "index.sqlite").read_bytes() == before
    journal = Journal(tmp_path)
    assert [*journal.without_rollouts()] == written
    journal.close()


def test_an_index_in_a_format_that_sqlite_does_not_know_is_rebuilt(tmp_path):
    """index.py 1: which SQLite tells as an OperationalError, like a full disk."""
    written = fill(tmp_path)
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as rows:
        (size,) = rows.execute("PRAGMA page_size").fetchone()
    with (tmp_path / "index.sqlite").open("r+b") as file:
        file.seek(44)  # the schema format number
        file.write(b"\x00\x00\x00\x63")
    told = pytest.raises(sqlite3.OperationalError, match="unsupported file format")
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as rows, told:
        rows.execute("SELECT * FROM records")
    with capture_logs() as logged:
        journal = Journal(tmp_path)
    assert [*journal.without_rollouts()] == written and not logged
    journal.close()
    assert (tmp_path / "index.sqlite").stat().st_size > size


def test_somebody_who_reads_the_index_holds_up_nobody(tmp_path):
    """index.py 1"""
    written = fill(tmp_path)
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as reader, capture_logs() as logged:
        reader.execute("SELECT number FROM records").fetchone()
        began = time.monotonic()
        journal = Journal(tmp_path)
        assert time.monotonic() - began < 4, "SQLite itself waits for 5 s"
        written.append(journal.append(JournalRecord(note={})))
        assert [*journal.without_rollouts()] == written
        assert journal._index.execute("PRAGMA busy_timeout").fetchone() == (0,)
        journal.close()
    assert [one["why"] for one in logged if one["event"] == "index_in_memory"] == ["database is locked"]
    journal = Journal(tmp_path)
    assert [*journal.without_rollouts()] == written
    journal.close()


def test_rows_that_disagree_never_stand_for_records_that_are_written_later(tmp_path):
    """index.py 3: nor where there was no room to take them back."""
    older, newer = tmp_path / "older", tmp_path / "newer"
    fill(older)
    journal = Journal(newer)
    written = [journal.append(JournalRecord(note=pb.NoteEvent(message=f"note {n}"))) for n in range(39)]
    journal.close()
    shutil.copy(older / "index.sqlite", newer / "index.sqlite")
    with capture_logs() as logged, without_room():
        journal = Journal(newer)
        assert [*journal.without_rollouts()] == written
        journal.close()
    assert [one["event"] for one in logged] == ["index_in_memory"]
    with closing(sqlite3.connect(newer / "index.sqlite")) as rows:
        assert rows.execute("SELECT * FROM sqlite_master").fetchall() == [], "the file that disagreed is gone"
    journal = Journal(newer)
    assert [*journal.without_rollouts()] == written and journal.select("dispatched") == []
    journal.close()


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path, monkeypatch):
    """journal.py 6: its first segment is not begun anew."""
    written = fill(tmp_path)
    before = (tmp_path / "000001.seg").read_bytes()

    def refused(_path="."):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refused)
        patched.setattr(os, "scandir", refused)
        with pytest.raises(OSError, match="cannot be opened: Permission denied"):
            Journal(tmp_path)
    assert (tmp_path / "000001.seg").read_bytes() == before
    journal = Journal(tmp_path)
    assert [*journal.without_rollouts()] == written
    journal.close()


def test_a_journal_without_descriptors_names_the_file_and_the_limit(tmp_path):
    fill(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OSError, match=r"/lock cannot be opened: Too many open files; .*\(ulimit -n\)$"):
            Journal(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_read_of_an_evaluation_does_not_grow_with_those_before_it(tmp_path):
    """Invariant 8: the work for one of thousands of evaluations is that for the first."""
    journal, work = Journal(tmp_path), []
    connection = journal._index
    for step in range(400):
        for place in range(3):
            event = pb.RolloutEvent(group=place)
            journal.append(JournalRecord(eval_rollout={"at_step": step, "rollout": event}))
        if step in (3, 399):
            work.append(0)

            def count():
                work[-1] += 1

            connection.set_progress_handler(count, 1)
            (found,) = journal.select("eval_rollout", group=1, step=step)
            connection.set_progress_handler(None, 0)
            assert (found.eval_rollout.at_step, found.eval_rollout.rollout.group) == (step, 1)
    assert work[1] <= work[0] + 5
    journal.close()


def test_an_index_of_an_earlier_release_is_read_as_it_is(tmp_path):
    """Its trees are made anew from its rows: no segment is read for that."""
    written = fill(tmp_path)
    older = sqlite3.connect(tmp_path / "index.sqlite")
    older.execute("DROP INDEX by_step_and_group")
    older.execute("CREATE INDEX by_step ON records (kind, step, number)")
    older.commit()
    older.close()
    rows = (tmp_path / "index.sqlite").stat().st_ino
    journal = Journal(tmp_path)
    assert journal.select("dispatched", step=2) == [
        one for one in written if one.WhichOneof("kind") == "dispatched" and one.dispatched.batch == 1
    ]
    journal.close()
    assert (tmp_path / "index.sqlite").stat().st_ino == rows


def test_a_journal_that_rests_and_wakes_looks_once_at_all_of_its_index(tmp_path, monkeypatch):
    """index.py 4: and not before it could."""
    written, looks, plain = fill(tmp_path), [], index._is_whole
    monkeypatch.setattr(index, "_is_whole", lambda rows: looks.append(1) or plain(rows))
    with monkeypatch.context() as unopened:
        unopened.setattr(index, "open_index", no_descriptor)
        journal = Journal(tmp_path)
    assert not looks, "in memory it was built anew"
    for _ in range(3):
        assert journal.rest()
        assert [*journal.without_rollouts()] == written
        assert len(looks) == 1
    journal.close()


def no_descriptor(_folder: Path) -> sqlite3.Connection:
    error = sqlite3.OperationalError("unable to open database file")
    error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
    raise error
