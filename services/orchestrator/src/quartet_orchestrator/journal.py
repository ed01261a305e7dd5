"""The journal of one run: numbered records, and an index that finds them without scanning.

1. Records are numbered 1, 2, 3, ...; those that are events of WatchRun have a second number, likewise without
   gaps.
2. `append` gives the numbers and the time. What was appended is on disk (see segments.py for how firmly), or
   OSError is raised and nothing was.
3. The index (SQLite, WAL) is a cache: on opening it is brought up to the segments' end, or rebuilt where it
   disagrees (index.py). Where its disk has no room for that, or cannot be reached, an index in memory takes
   its place for as long as the journal is open: reading a journal needs no room.
   A sealed segment is compacted (compaction.py says when) by `compact`, in a thread, and `swap`, on the loop.
   Whoever reads holds `_layout`, so that where a record lies and what lies there belong together.
4. One process holds a journal at a time (a lock on the folder).
5. One that nobody uses holds no descriptor after `rest`; whoever reads it next opens it again. After `close`
   nobody does, not even a thread that was on its way.
6. A journal that cannot be opened is `JournalCorrupt` or OSError; nothing stays open, no segment was changed.

docs/journal.md describes the format and what is synced when.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
from quartet.kit.folder import lock_file
from quartet.v1 import journal_pb2 as jpb

from quartet_orchestrator import index
from quartet_orchestrator.records import EVENTS, parse
from quartet_orchestrator.segments import REWRITTEN, SEGMENT_BYTES, Frame, Segments, end_of, named

# Everything a journal puts into its folder.
FILES = ("*.seg", "index.sqlite*", "lock", f"*{REWRITTEN}")

# What a follower holds in memory at once: one rollout of the largest size, or many small ones.
PAGE_BYTES = 4 << 20

# How often a journal that could not be opened, or written, is tried again.
AGAIN_S = 5.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Compacted:
    """A sealed segment as it will be."""

    segment: int
    file: Path
    # Number, place now, place then, of every record in it.
    moves: list[tuple[int, Frame, Frame]]

    @property
    def given_up_bytes(self) -> int:
        """By how much the segment gets smaller."""
        _, now, then = self.moves[-1]
        return end_of(now) - end_of(then)


class _StaysAsItIs(Exception):
    """A record of the segment is still needed whole."""


class Journal:
    """The journal in one folder, opened by making it. Raises JournalCorrupt or OSError."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._layout = threading.Lock()
        # Segments that were looked at and have nothing to give up.
        self._compacted: set[int] = set()
        # Whether every row of its file was looked at since this was made, or was written since.
        self._index_is_whole = False
        # What gives every descriptor back; None while there is none.
        self._opened: ExitStack | None = None
        self._closed = False
        self._open()

    def _open(self) -> None:
        folder = self._folder
        with named(folder, "opened"), ExitStack() as opened:
            try:
                lock = lock_file(folder / "lock")
            except BlockingIOError:
                raise BlockingIOError(f"{folder} is held by another orchestrator; stop it first") from None
            opened.callback(lock.close)
            self._segments = Segments(folder, self._segment_bytes)
            opened.callback(self._segments.close)
            self.torn_bytes = self._segments.torn_bytes
            try:
                self._open_index(opened)
            except sqlite3.Error as error:
                if index.is_damage(error):
                    raise OSError(f"the index of {folder} cannot be written: {error}") from error
                log.warning("index_in_memory", folder=str(folder), why=str(error))
                self._use(index.in_memory(), opened)
            self._opened = opened.pop_all()

    def _open_index(self, opened: ExitStack) -> None:
        """Brings it up to the segments' end. Raises sqlite3.Error."""
        try:
            self._use(index.open_index(self._folder), opened)
        except sqlite3.Error as error:
            if not index.is_damage(error):
                raise
            # Damage inside, which only whoever reads there finds, or rows of other records.
            index.throw_away(self._folder)
            self._use(index.open_index(self._folder), opened)
        self._index_is_whole = True

    def _use(self, connection: sqlite3.Connection, opened: ExitStack) -> None:
        with ExitStack() as failed:
            failed.callback(connection.close)
            self.last_number, self.last_event = index.catch_up(
                connection, self._segments, looks_at_all=not self._index_is_whole
            )
            self._index = connection
            opened.push(failed.pop_all())

    @contextmanager
    def _using(self) -> Iterator[None]:
        """The journal is open and what lies in it does not move. Opening reads the last segment: it is meant
        for a thread."""
        with self._layout:
            if self._closed:
                raise OSError(f"the journal in {self._folder} is closed")
            if self._opened is None:
                self._open()
            try:
                yield
            except sqlite3.Error as error:
                if index.is_damage(error):
                    # Damaged where opening it reads nothing: who opens it next builds it again.
                    assert self._opened is not None
                    self._index_is_whole = False
                    self._opened.callback(index.throw_away, self._folder)
                raise OSError(f"the index of {self._folder} cannot be read: {error}") from error

    @property
    def is_open(self) -> bool:
        """Whether it can be appended to; False while it rests and after `close`."""
        return self._opened is not None

    def wake(self) -> None:
        """Opens a journal that rests, to append to it. Meant for a thread."""
        with self._using():
            pass

    def rest(self) -> bool:
        """Gives every descriptor back, until somebody reads; not where a thread is at it, which may open it
        for seconds. Whether it did."""
        if not self._layout.acquire(blocking=False):
            return False
        try:
            self._give_back()
        finally:
            self._layout.release()
        return True

    def close(self) -> None:
        """Gives every descriptor back, for good."""
        with self._layout:
            self._closed = True
            self._give_back()

    def _give_back(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def append(self, record: jpb.JournalRecord) -> jpb.JournalRecord:
        """Numbers, dates and writes the record."""
        kind = record.WhichOneof("kind")
        assert kind is not None and self.is_open
        record.number = self.last_number + 1
        record.event = self.last_event + 1 if kind in EVENTS else 0
        record.at_ms = time.time_ns() // 1_000_000
        frame = self._segments.append(record.SerializeToString())
        try:
            index.enter(self._index, record, frame)
        except sqlite3.Error as error:
            # A frame without its row would give its number to two records.
            self._segments.take_back(frame)
            raise OSError(f"the index of {self._folder} cannot be written: {error}") from error
        self.last_number = record.number
        self.last_event = record.event or self.last_event
        return record

    def select(
        self, kind: str, *, group: int | None = None, step: int | None = None
    ) -> list[jpb.JournalRecord]:
        """The records of a kind, in order; of one group (calls: one seq_id) or one step (evaluations: steps
        applied before), or both."""
        with self._using():
            rows = self._index.execute(
                "SELECT segment, offset, length FROM records WHERE kind = ?"
                + (" AND grp = ?" if group is not None else "")
                + (" AND step = ?" if step is not None else "")
                + " ORDER BY number",
                [kind, *(value for value in (group, step) if value is not None)],
            ).fetchall()
            return [self._read(Frame(*row)) for row in rows]

    def without_rollouts(self) -> Iterator[jpb.JournalRecord]:
        """Everything but rollouts, in order: what a run's state is folded from."""
        with self._using():
            rows = self._index.execute(
                "SELECT segment, offset, length FROM records"
                " WHERE kind NOT IN ('rollout', 'eval_rollout') ORDER BY number"
            ).fetchall()
        return (self._locked_read(Frame(*row)) for row in rows)

    def events(self, after: int, limit: int, *, rollouts: bool) -> list[jpb.JournalRecord]:
        """The next events after one, at most so many, and no more than about PAGE_BYTES."""
        with self._using():
            rows = self._index.execute(
                "SELECT segment, offset, length FROM records WHERE event > ?"
                + ("" if rollouts else " AND kind NOT IN ('rollout', 'eval_rollout')")
                + " ORDER BY event LIMIT ?",
                (after, limit),
            ).fetchall()
            records, size = [], 0
            for row in rows:
                records.append(self._read(Frame(*row)))
                size += records[-1].ByteSize()
                if size >= PAGE_BYTES:
                    break
            return records

    def size_bytes(self) -> int:
        """Bytes of all segments; the index is not counted."""
        return self._segments.size_bytes()

    def uncompacted(self) -> list[int]:
        """The sealed segments that may have something to give up, oldest first. (One that gave it up is
        smaller than a segment is when it is sealed.)"""
        return [
            number
            for number, size in self._segments.sealed()
            if size >= self._segment_bytes and number not in self._compacted
        ]

    def compact(
        self, segment: int, slim: Callable[[jpb.JournalRecord], jpb.JournalRecord | None]
    ) -> Compacted | None:
        """Prepares a sealed segment of slimmer records; None where `slim` says that one has to stay as it is.
        Meant for a thread."""
        moves: list[tuple[int, Frame, Frame]] = []

        def slimmed() -> Iterator[bytes]:
            end = 0
            for frame, payload in self._segments.scan(segment, last=segment):
                record = slim(parse(payload))
                if record is None:
                    raise _StaysAsItIs
                slimmer = record.SerializeToString()
                moves.append((record.number, frame, Frame(segment, end, len(slimmer))))
                end = end_of(moves[-1][2])
                yield slimmer

        try:
            return Compacted(segment, self._segments.rewrite(segment, slimmed()), moves)
        except _StaysAsItIs:
            return None

    def swap(self, compacted: Compacted) -> None:
        """Puts a compacted segment in its place. A kill between the two lines leaves an index that disagrees
        with the file's size, and is rebuilt."""
        with self._layout, ExitStack() as failed:
            # The next attempt makes another one: on a full disk they would make it fuller.
            failed.callback(compacted.file.unlink, missing_ok=True)
            index.move(self._index, [(number, then) for number, _, then in compacted.moves])
            try:
                self._segments.replace(compacted.segment, compacted.file)
            except OSError:
                index.move(self._index, [(number, now) for number, now, _ in compacted.moves])
                raise
            failed.pop_all()
            self._compacted.add(compacted.segment)

    def syncer(self) -> Callable[[], None]:
        """What makes everything appended so far survive a power cut; call it once, in a thread."""
        return self._segments.syncer()

    def _locked_read(self, frame: Frame) -> jpb.JournalRecord:
        with self._using():
            return self._read(frame)

    def _read(self, frame: Frame) -> jpb.JournalRecord:
        return parse(self._segments.read(frame))
