"""The index of a journal: one row per record, in SQLite. A cache of the segments, never the truth.

1. One that is damaged, or has another layout, is thrown away; whoever opened it enters the records again.
   A disk that is full, a process without descriptors, or somebody else who reads it, is no reason to, and
   not waited for: it stays as it is, and is read also where nothing can be written. A power cut takes no
   more of it than its end.
2. Moving rows happens whole or not at all.
3. It is brought up to the segments' end by reading no more of them than it lacks; one that disagrees with
   where they end, or with the last record that it knows, counts as damaged: its rows stand for no record,
   not even where there is no room for others.
4. So does one with rows missing, or with keys or places that are not those it was given: a copy of the folder
   that was made while somebody wrote has pages of several moments, which SQLite itself takes for whole. To
   look costs some microseconds of each record, and a journal that rests and wakes looks once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from quartet.v1 import journal_pb2 as jpb

from quartet_orchestrator.records import parse
from quartet_orchestrator.segments import HEAD_BYTES, Frame, JournalCorrupt, Segments, end_of

# Raised when the tables change: an index of another layout is rebuilt.
INDEX_LAYOUT = 1

# What SQLite says of a disk or a process that it gets nothing from, or of somebody else who has the file. The
# class of an error tells less: that a file has no format that it knows is an OperationalError, too.
_NO_DAMAGE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
    }
)
# Of an extended code, the code that it refines.
_PRIMARY = 0xFF

# Records that do not begin where the one before ended, nor with a segment of their own.
_OUT_OF_PLACE = f"""
SELECT count(*) FROM records AS one LEFT JOIN records AS before ON before.number = one.number - 1
WHERE NOT coalesce(
  (one.segment = before.segment AND one.offset = before.offset + before.length + {HEAD_BYTES})
  OR (one.segment = coalesce(before.segment, 0) + 1 AND one.offset = 0
      AND (before.number IS NOT NULL OR one.number = 1)),
  0)
"""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
  number INTEGER PRIMARY KEY, segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
  kind TEXT NOT NULL, grp INTEGER, step INTEGER, event INTEGER);
CREATE INDEX IF NOT EXISTS by_group ON records (kind, grp, number);
DROP INDEX IF EXISTS by_step;
CREATE INDEX IF NOT EXISTS by_step_and_group ON records (kind, step, grp, number);
CREATE UNIQUE INDEX IF NOT EXISTS by_event ON records (event) WHERE event IS NOT NULL;
"""


def open_index(folder: Path) -> sqlite3.Connection:
    """The index in the folder, new and empty where it was damaged. Raises sqlite3.Error."""
    path = folder / "index.sqlite"
    try:
        return _opened(path)
    # SQLite's words about a schema that is damaged have bytes of it, which may be no text.
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if not is_damage(error):
            raise
        throw_away(folder)
        return _opened(path)


def is_damage(error: sqlite3.Error | UnicodeDecodeError) -> bool:
    """Whether it tells of what the index holds, and not of its disk. (What is not SQLite's own has no code: a
    text that is none, or what is found here.)"""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & _PRIMARY not in _NO_DAMAGE


def in_memory() -> sqlite3.Connection:
    """A new and empty one that no disk has to take."""
    return _opened(":memory:")


def _opened(path: Path | str) -> sqlite3.Connection:
    with ExitStack() as failed:
        # Nobody has to be waited for: somebody who only looks at the file would hold up all runs.
        index = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        failed.callback(index.close)
        # The journal's lock keeps others away. So it is read without a file of shared memory, for which a
        # full disk has no room.
        index.execute("PRAGMA locking_mode = EXCLUSIVE")
        index.execute("PRAGMA journal_mode = WAL")
        # The segments are the truth, and an index that lost its end in a power cut catches up. With OFF it
        # would lose pages in its middle, too, and then rows, in silence.
        index.execute("PRAGMA synchronous = NORMAL")
        layout = index.execute("PRAGMA user_version").fetchone()[0]
        if layout not in (0, INDEX_LAYOUT):
            raise sqlite3.DatabaseError(f"index layout {layout}")
        index.executescript(_SCHEMA)
        if not layout:
            index.execute(f"PRAGMA user_version = {INDEX_LAYOUT}")
        failed.pop_all()
    return index


def throw_away(folder: Path) -> None:
    """Removes one that is damaged, which needs no room: it is built again from the segments."""
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
        (folder / name).unlink(missing_ok=True)


def enter(index: sqlite3.Connection, record: jpb.JournalRecord, frame: Frame) -> None:
    """Adds the row of one record. Raises sqlite3.Error."""
    kind = record.WhichOneof("kind")
    assert kind is not None
    group, step = _keys(record, kind)
    index.execute(
        "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            record.number,
            frame.segment,
            frame.offset,
            frame.length,
            kind,
            group,
            step,
            record.event or None,
        ),
    )


def catch_up(index: sqlite3.Connection, segments: Segments, *, looks_at_all: bool = True) -> tuple[int, int]:
    """Enters what the segments have beyond the index, after a look at all that it has, or at its last record.
    Returns the last number and the last event.

    Raises JournalCorrupt where the numbers have gaps, and sqlite3.Error: damage where it disagrees.
    """
    segment, offset, number, event = 1, 0, 0, 0
    row = index.execute(
        "SELECT number, segment, offset, length FROM records ORDER BY number DESC LIMIT 1"
    ).fetchone()
    if row is not None:
        if looks_at_all and not _is_whole(index):
            raise sqlite3.DatabaseError("it has not every record")
        last = Frame(*row[1:])
        if not (_agrees(segments, row[0], last) and _ends_agree(index, segments)):
            raise sqlite3.DatabaseError("it disagrees with the segments")
        number = row[0]
        segment, offset = last.segment, end_of(last)
        event = index.execute("SELECT coalesce(max(event), 0) FROM records").fetchone()[0]
    index.execute("BEGIN")
    for frame, payload in segments.scan(segment, offset):
        record = parse(payload)
        if record.number != number + 1 or (record.event and record.event != event + 1):
            index.execute("ROLLBACK")
            raise JournalCorrupt(f"{segments.folder}: record {record.number} follows record {number}")
        enter(index, record, frame)
        number = record.number
        event = record.event or event
    index.execute("COMMIT")
    return number, event


def move(index: sqlite3.Connection, places: Sequence[tuple[int, Frame]]) -> None:
    """Records, by number, that lie elsewhere now. Raises OSError."""
    rows = [(frame.offset, frame.length, number) for number, frame in places]
    try:
        index.execute("BEGIN")
        index.executemany("UPDATE records SET offset = ?, length = ? WHERE number = ?", rows)
        index.execute("COMMIT")
    except sqlite3.Error as error:
        if index.in_transaction:  # a full disk has ended it already
            index.execute("ROLLBACK")
        raise OSError(f"the index cannot be written: {error}") from error


def _is_whole(index: sqlite3.Connection) -> bool:
    """Whether it has a row for every record up to its last, each at its place and under all its keys."""
    (found,) = index.execute("PRAGMA integrity_check(1)").fetchone()
    return bool(found == "ok" and index.execute(_OUT_OF_PLACE).fetchone() == (0,))


def _agrees(segments: Segments, number: int, frame: Frame) -> bool:
    """Whether the record of that number lies there."""
    try:
        return segments.holds(frame) and parse(segments.read(frame)).number == number
    except JournalCorrupt:
        return False


def _ends_agree(index: sqlite3.Connection, segments: Segments) -> bool:
    """Whether every sealed segment ends where the index says."""
    ends: dict[int, int] = {}
    for row in index.execute("SELECT segment, max(offset), length FROM records GROUP BY segment"):
        ends[row[0]] = end_of(Frame(*row))
    return all(ends[number] == size for number, size in segments.sealed() if number in ends)


def _keys(record: jpb.JournalRecord, kind: str) -> tuple[int | None, int | None]:
    """What the index finds the record by: its group and its step, where it has them."""
    if kind == "rollout":
        return record.rollout.group, record.rollout.step
    if kind == "eval_rollout":
        return record.eval_rollout.rollout.group, record.eval_rollout.at_step
    if kind == "dispatched":
        return record.dispatched.group, record.dispatched.batch + 1
    if kind == "discarded":
        return record.discarded.group, None
    if kind == "acked":
        return record.acked.group, None
    if kind == "call":
        return record.call.seq_id, None
    if kind == "batch":
        return None, record.batch.batch + 1
    if kind == "step":
        return None, record.step.step
    if kind == "eval":
        return None, record.eval.step
    return None, None
