"""The journal under torn tails, flipped bits, lost indexes and restarts."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
import shutil
import sqlite3
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quartet.errors import QuartetError
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.journal_pb2 import JournalRecord
from quartet_orchestrator import index
from quartet_orchestrator import journal as journal_module
from quartet_orchestrator.book import Book
from quartet_orchestrator.journal import Journal
from quartet_orchestrator.segments import JournalCorrupt, Segments


def note(text: str) -> JournalRecord:
    return JournalRecord(note=pb.NoteEvent(message=text))


def fill(folder: Path, count: int, segment_bytes: int = 300) -> list[JournalRecord]:
    journal = Journal(folder, segment_bytes)
    written = []
    for number in range(count):
        if number % 3 == 2:
            record = JournalRecord(dispatched={"group": number, "batch": number // 6, "members": 2})
        else:
            record = note(f"note {number}")
        written.append(journal.append(record))
    journal.syncer()()
    journal.close()
    return written


def contents(folder: Path) -> list[JournalRecord]:
    journal = Journal(folder, 300)
    try:
        records = [*journal.without_rollouts()]
        assert [r.number for r in records] == list(range(1, journal.last_number + 1))
        events = journal.events(0, 10**6, rollouts=True)
        assert [r.event for r in events] == list(range(1, journal.last_event + 1))
        return records
    finally:
        journal.close()


def test_what_was_written_is_found_by_number_kind_group_and_event(tmp_path):
    """journal.py 1 and 4"""
    written = fill(tmp_path, 40)
    assert len(list(tmp_path.glob("*.seg"))) > 3
    assert contents(tmp_path) == written
    journal = Journal(tmp_path, 300)
    assert journal.select("dispatched", group=8) == [written[8]]
    assert journal.select("dispatched", step=2) == [written[8], written[11]]
    assert [r.note.message for r in journal.events(5, 2, rollouts=False)] == ["note 7", "note 9"]
    with pytest.raises(BlockingIOError, match="held by another orchestrator"):
        Journal(tmp_path)
    journal.close()


@settings(max_examples=60)
@given(st.integers(1, 25), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_torn_tail_leaves_the_longest_whole_prefix(count, cut, keep_index, garbage):
    """Invariant 2: what was acknowledged before a crash is there after it.

    segments.py 2
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = fill(folder, count)
        last = sorted(folder.glob("*.seg"))[-1]
        size = last.stat().st_size
        kept = cut % (size + 1)
        with last.open("r+b") as file:
            file.truncate(kept)
            if garbage:
                file.seek(kept)
                file.write(random.Random(cut).randbytes(cut % 50))
        if not keep_index:
            for path in folder.glob("index.sqlite*"):
                path.unlink()
        found = contents(folder)
        assert found == written[: len(found)]
        # Nothing before the cut is lost: the next record would not have been whole.
        lost = written[len(found) :]
        if lost:
            assert last.stat().st_size + 12 + lost[0].ByteSize() > kept
        journal = Journal(folder, 300)
        assert journal.torn_bytes == 0
        assert journal.append(note("after")).number == len(found) + 1
        journal.close()


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 7), st.booleans())
def test_a_flipped_bit_is_never_read_as_something_else(position, bit, keep_index):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = fill(folder, 25)
        segments = sorted(folder.glob("*.seg"))
        sizes = [path.stat().st_size for path in segments]
        position %= sum(sizes)
        index = 0
        while position >= sizes[index]:
            position -= sizes[index]
            index += 1
        data = bytearray(segments[index].read_bytes())
        data[position] ^= 1 << bit
        segments[index].write_bytes(data)
        if not keep_index:
            for path in folder.glob("index.sqlite*"):
                path.unlink()
        last_frame = sizes[-1] - 12 - written[-1].ByteSize()
        if index == len(segments) - 1 and position >= last_frame:
            assert contents(folder) == written[:-1]  # nothing follows: no different from a torn tail
        else:
            files = {path: path.read_bytes() for path in segments}
            for _ in range(2):  # a damaged journal stays as it is, and lets go of its lock
                with pytest.raises(JournalCorrupt):
                    contents(folder)
            assert {path: path.read_bytes() for path in segments} == files


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 200), st.booleans())
def test_a_hole_with_records_behind_it_is_no_torn_tail(position, length, zeros):
    """Any damage inside the last segment that leaves a whole record behind it is found, and cut by nobody.

    segments.py 3, journal.py 6
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = fill(folder, 30, segment_bytes=1 << 20)
        (segment,) = folder.glob("*.seg")
        data = segment.read_bytes()
        last_frame = len(data) - 12 - written[-1].ByteSize()
        start = position % last_frame
        end = min(start + length, last_frame)
        hole = bytes(end - start) if zeros else random.Random(position).randbytes(end - start)
        damaged = data[:start] + hole + data[end:]
        segment.write_bytes(damaged)
        if damaged == data:
            return
        for path in folder.glob("index.sqlite*"):
            path.unlink()
        with pytest.raises(JournalCorrupt, match="and a whole one behind it"):
            Journal(folder, 1 << 20)
        assert segment.read_bytes() == damaged


@pytest.mark.parametrize("length", [1, 2, 12, 13, 40])
def test_what_was_put_between_two_records_is_no_torn_tail(tmp_path, length):
    """segments.py 3: however near the next whole frame is."""
    written = fill(tmp_path, 3, segment_bytes=1 << 20)
    segment = tmp_path / "000001.seg"
    data = segment.read_bytes()
    last_frame = len(data) - 12 - written[-1].ByteSize()
    damaged = data[:last_frame] + bytes(length) + data[last_frame:]
    segment.write_bytes(damaged)
    whole = f"bad frame at byte {last_frame} and a whole one behind it, at byte {last_frame + length}"
    with pytest.raises(JournalCorrupt, match=whole):
        Journal(tmp_path, 1 << 20)
    assert segment.read_bytes() == damaged


def test_a_full_segment_is_on_the_disk_before_its_successor_exists(tmp_path, monkeypatch):
    """segments.py 3: else a power cut would leave a hole in the middle of the records."""
    synced, fsync = [], os.fsync

    def sync(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if name.endswith(".seg"):
            synced.append((name, sorted(path.name for path in tmp_path.glob("*.seg"))[-1]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    journal = Journal(tmp_path, 1)
    for number in range(3):
        journal.append(note(str(number)))
    journal.close()
    assert synced == [("000001.seg", "000001.seg"), ("000002.seg", "000002.seg")]


def test_of_a_good_index_only_what_it_lacks_is_entered(tmp_path, monkeypatch):
    """journal.py 3, index.py 3: a long run is opened without reading all of it."""
    written = fill(tmp_path, 41)
    entered, enter = [], index.enter
    monkeypatch.setattr(
        index, "enter", lambda rows, record, frame: entered.append(record) or enter(rows, record, frame)
    )
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as rows:
        ends = [end for (end,) in rows.execute("SELECT max(number) FROM records GROUP BY segment")]
    assert len(ends) > 3 and ends[-1] == 41
    for indexed in (*ends, 40):
        with closing(sqlite3.connect(tmp_path / "index.sqlite")) as rows, rows:
            rows.execute("DELETE FROM records WHERE number > ?", (indexed,))
        entered.clear()
        Journal(tmp_path, 300).close()
        assert entered == written[indexed:]


def test_a_missing_segment_is_noticed(tmp_path):
    fill(tmp_path, 40)
    (tmp_path / "000002.seg").unlink()
    with pytest.raises(JournalCorrupt, match="missing"):
        Journal(tmp_path)


def test_an_unreadable_or_foreign_index_is_rebuilt(tmp_path):
    """journal.py 3, index.py 1 and 3"""
    written = fill(tmp_path / "a", 20)
    (tmp_path / "a/index.sqlite").write_bytes(b"this is no database at all" * 100)
    assert contents(tmp_path / "a") == written
    fill(tmp_path / "b", 35)
    for path in (tmp_path / "a").glob("index.sqlite*"):
        path.unlink()
    shutil.copy(tmp_path / "b/index.sqlite", tmp_path / "a/index.sqlite")
    assert contents(tmp_path / "a") == written
    with closing(sqlite3.connect(tmp_path / "a/index.sqlite")) as rows, rows:
        rows.execute("UPDATE records SET length = length - 1 WHERE number = 20")
    assert contents(tmp_path / "a") == written


@pytest.mark.parametrize(
    ("payloads", "why"),
    [
        ([JournalRecord(number=1, acked={}), JournalRecord(number=3, acked={})], "record 3 follows record 1"),
        ([JournalRecord(number=2, acked={})], "record 2 follows record 0"),
        (
            [JournalRecord(number=1, event=1, note={}), JournalRecord(number=2, event=3, note={})],
            "record 2 follows record 1",
        ),
        ([JournalRecord(number=1)], "record 1 is of no kind"),
        ([b"\xff" * 8], "a whole frame holds no record"),
    ],
)
def test_whole_frames_that_are_no_journal_are_refused(tmp_path, payloads, why):
    """journal.py 1: each is as it was written, and some are of another journal."""
    segments = Segments(tmp_path)
    for one in payloads:
        segments.append(one if isinstance(one, bytes) else one.SerializeToString())
    segments.close()
    for _ in range(2):
        with pytest.raises(JournalCorrupt, match=why):
            Journal(tmp_path)


@pytest.mark.parametrize("name", ["backup", "000001 (copy)", "-1", "²"])
def test_a_file_that_is_no_segment_is_named(tmp_path, name):
    fill(tmp_path, 5)
    shutil.copy(tmp_path / "000001.seg", tmp_path / f"{name}.seg")
    with pytest.raises(JournalCorrupt, match=f"has {re.escape(name)}.seg, which is no segment; move it"):
        Journal(tmp_path)


def test_a_failed_write_leaves_no_half_record(tmp_path, monkeypatch):
    """journal.py 2"""
    journal = Journal(tmp_path)
    journal.append(note("one"))

    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, data[: len(data) // 2]))
    with pytest.raises(OSError, match=r"cannot be written: it took .* make room there"):
        journal.append(note("two"))
    monkeypatch.undo()
    assert journal.append(note("three")).number == 2
    journal.close()
    assert [r.note.message for r in contents(tmp_path)] == ["one", "three"]


def test_what_the_disk_does_not_cut_off_is_cut_before_anything_else_is_written(tmp_path, monkeypatch):
    """segments.py 1: a short write, and a frame whose row was refused."""
    journal = Journal(tmp_path)
    journal.append(note("one"))
    whole, gone = os.write, Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(os, "ftruncate", gone)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: whole(fd, data[: len(data) // 2]))
        with pytest.raises(OSError, match=r"cannot be written: it took .* make room there"):
            journal.append(note("two"))
    size = (tmp_path / "000001.seg").stat().st_size
    with pytest.raises(OSError, match=r"000001.seg cannot be cut to its whole records: Input/output error"):
        journal.append(note("two"))
    assert (tmp_path / "000001.seg").stat().st_size == size and gone.call_count == 2
    monkeypatch.undo()
    assert journal.append(note("three")).number == 2
    monkeypatch.setattr(os, "ftruncate", gone)
    journal._index.execute("PRAGMA query_only = ON")
    with pytest.raises(OSError, match="cannot be written: attempt to write a readonly database"):
        journal.append(note("four"))
    journal._index.execute("PRAGMA query_only = OFF")
    shutil.copytree(tmp_path, tmp_path / "killed")
    assert [r.note.message for r in contents(tmp_path / "killed")] == ["one", "three"]
    monkeypatch.undo()
    assert journal.append(note("five")).number == 3
    for call in ("ftruncate", "pwrite"):
        monkeypatch.setattr(os, call, gone)
    journal._index.execute("PRAGMA query_only = ON")
    with pytest.raises(OSError, match="cannot be written: attempt to write a readonly database"):
        journal.append(note("six"))
    monkeypatch.undo()
    monkeypatch.setattr(os, "ftruncate", gone)
    journal.close()
    assert [r.note.message for r in contents(tmp_path)] == ["one", "three", "five"]


@pytest.mark.parametrize(("call", "done"), [("write", "written"), ("pread", "read"), ("fsync", "synced")])
def test_what_a_disk_refuses_names_the_file(tmp_path, monkeypatch, call, done):
    """Who is to mend it has several disks."""
    journal = Journal(tmp_path)
    journal.append(note("one"))
    monkeypatch.setattr(os, call, Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    use = {
        "write": lambda: journal.append(note("two")),
        "pread": lambda: journal.events(0, 1, rollouts=False),
        "fsync": lambda: journal.syncer()(),
    }
    with pytest.raises(OSError, match=rf"^{tmp_path}/000001.seg cannot be {done}: Input/output error$"):
        use[call]()
    monkeypatch.undo()
    assert journal.append(note("three")).number == 2
    journal.close()


def test_a_failed_index_leaves_no_record(tmp_path):
    journal = Journal(tmp_path)
    journal.append(note("one"))
    journal._index.execute("PRAGMA query_only = ON")
    with pytest.raises(OSError, match="cannot be written: attempt to write a readonly database"):
        journal.append(note("two"))
    journal._index.execute("PRAGMA query_only = OFF")
    assert journal.append(note("three")).number == 2
    journal.close()
    assert [r.note.message for r in contents(tmp_path)] == ["one", "three"]


def test_a_segment_that_cannot_be_started_is_started_later(tmp_path, monkeypatch):
    """segments.py 4"""
    journal = Journal(tmp_path, 1)
    journal.append(note("one"))

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.open", full)
    with pytest.raises(OSError, match="no space left"):
        journal.append(note("two"))
    monkeypatch.undo()
    journal.append(note("three"))
    journal.close()
    assert [r.note.message for r in contents(tmp_path)] == ["one", "three"]


async def test_a_page_of_events_is_bounded_in_bytes(tmp_path, monkeypatch):
    """Invariant 8: what a follower holds in memory."""
    monkeypatch.setattr(journal_module, "PAGE_BYTES", 1000)
    book = Book(tmp_path)
    book.write(submitted={"run_id": "r", "config_toml": ""})
    for number in range(30):
        book.note(f"{number} " + "x" * 300)
    assert len(book.journal.events(0, 64, rollouts=True)) == 4
    seen = []
    follower = book.events(0, rollouts=True)
    async for record in follower:
        seen.append(record.event)
        if record.event == 30:
            break
    await follower.aclose()
    assert seen == list(range(1, 31))
    book.close()


async def test_a_follower_reads_only_what_is_there_to_be_read(tmp_path, monkeypatch):
    book = Book(tmp_path)
    book.write(submitted={"run_id": "r", "config_toml": ""})
    reads = []
    events = book.journal.events
    monkeypatch.setattr(
        book.journal,
        "events",
        lambda after, *rest, **asked: reads.append(after) or events(after, *rest, **asked),
    )
    follower = book.events(0, rollouts=True)
    for number in range(1, 4):
        waiting = asyncio.create_task(anext(follower))
        await asyncio.sleep(0)  # it has told everything, and waits
        book.note(str(number))
        assert (await waiting).event == number
    await follower.aclose()
    assert reads == [0, 1, 2]
    book.close()


async def test_a_follower_is_told_that_nothing_can_be_written_for_as_long_as_it_is_so(tmp_path, monkeypatch):
    book = Book(tmp_path)
    book.write(submitted={"run_id": "r", "config_toml": ""})
    waiting = asyncio.create_task(anext(book.events(0, rollouts=True)))
    await asyncio.sleep(0)  # there is nothing to tell, and it waits
    monkeypatch.setattr(os, "write", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space left"):
        book.note("lost")
    async with asyncio.timeout(60):
        with pytest.raises(QuartetError, match=r"the run waits for its journal: .*No space left") as caught:
            await waiting
    assert caught.value.reason == "NOT_READY"
    monkeypatch.undo()
    book.note("kept")
    follower = book.events(0, rollouts=True)
    assert (await anext(follower)).note.message == "kept"
    waiting = asyncio.create_task(anext(follower))
    await asyncio.sleep(0)
    book.note("later")
    assert (await waiting).note.message == "later"
    await follower.aclose()
    book.close()


def test_the_largest_payload_is_read_again_and_a_larger_one_is_refused(tmp_path, monkeypatch):
    """segments.py 4"""
    monkeypatch.setattr("quartet_orchestrator.segments.MAX_PAYLOAD_BYTES", 100)
    segments = Segments(tmp_path)
    frame = segments.append(bytes(100))
    with pytest.raises(AssertionError):
        segments.append(bytes(101))
    segments.close()
    again = Segments(tmp_path)
    assert again.torn_bytes == 0 and again.read(frame) == bytes(100)
    again.close()


def test_nobody_else_reads_a_journal(tmp_path):
    """segments.py 6"""
    fill(tmp_path, 60, segment_bytes=1000)
    segments = list(tmp_path.glob("*.seg"))
    assert len(segments) > 1
    assert all(one.stat().st_mode & 0o077 == 0 for one in segments)


def test_reading_holds_few_files_open(tmp_path):
    written = fill(tmp_path, 60, segment_bytes=100)
    journal = Journal(tmp_path, 100)
    before = len(os.listdir("/proc/self/fd"))
    assert [*journal.without_rollouts()] == written
    assert len(os.listdir("/proc/self/fd")) - before <= 4
    journal.close()


@pytest.mark.parametrize("leave", [Journal.rest, Journal.close])
def test_a_journal_that_nobody_uses_holds_no_descriptor(tmp_path, leave):
    """journal.py 5: neither of the segments that were read nor of the one that is written."""
    written = fill(tmp_path, 40)
    journal = Journal(tmp_path, 300)
    assert [*journal.without_rollouts()] == written and descriptors(tmp_path) > 3
    leave(journal)
    assert descriptors(tmp_path) == 0 and not journal.is_open
    if leave is Journal.rest:
        assert journal.select("dispatched", group=8) == [written[8]] and journal.is_open
        journal.close()
    with pytest.raises(OSError, match="is closed"):
        journal.wake()


async def test_a_book_says_that_its_tail_was_torn(tmp_path):
    book = Book(tmp_path)
    book.write(submitted={"run_id": "r", "config_toml": ""})
    book.note("before")
    book.close()
    with (tmp_path / "000001.seg").open("ab") as file:
        file.write(b"torn")
    book = Book(tmp_path)
    before, torn = [r.note async for r in _until_now(book)]
    book.close()
    assert before.message == "before" and "4 torn bytes" in torn.message
    assert torn.level == pb.NOTE_LEVEL_WARNING


async def _until_now(book):
    for record in book.journal.events(0, 100, rollouts=True):
        yield record


def descriptors(folder: Path) -> int:
    links = (os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd"))
    return sum(link.startswith(f"{folder}/") for link in links)


async def test_who_stops_waiting_for_the_disk_leaves_no_descriptor(tmp_path):
    """book.py 4: cancelled before a thread had time for it."""
    book, free = Book(tmp_path / "run"), threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.create_task(asyncio.to_thread(free.wait))
    await asyncio.sleep(0)
    before = descriptors(tmp_path)
    for _ in range(5):
        settling = asyncio.create_task(book.settled())
        await asyncio.sleep(0.01)
        settling.cancel()
        await asyncio.gather(settling, return_exceptions=True)
    free.set()
    await busy
    await asyncio.to_thread(lambda: None)  # behind them
    assert descriptors(tmp_path) == before
    book.close()
