"""The index of a journal: one row per record, in SQLite. A cache of the segments, never the truth.

1. One that cannot be read, or has another layout, is thrown away; whoever opened it enters the records again.
   A power cut takes no more of it than its end.
2. Moving rows happens whole or not at all.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from quartet.v1 import journal_pb2 as jpb

from quartet_orchestrator.segments import Frame

# Raised when the tables change: an index of another layout is rebuilt.
INDEX_LAYOUT = 1

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
    """The index in the folder, new and empty where it could not be read. Raises sqlite3.Error."""
    path = folder / "index.sqlite"
    try:
        index = _connect(path)
        layout = index.execute("PRAGMA user_version").fetchone()[0]
        if layout not in (0, INDEX_LAYOUT):
            raise sqlite3.DatabaseError(f"index layout {layout}")
        index.executescript(_SCHEMA)
    except sqlite3.DatabaseError:
        throw_away(folder)
        index = _connect(path)
        index.executescript(_SCHEMA)
    index.execute(f"PRAGMA user_version = {INDEX_LAYOUT}")
    return index


def throw_away(folder: Path) -> None:
    """Removes one that cannot be read: it is built again from the segments."""
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


def _connect(path: Path) -> sqlite3.Connection:
    index = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    index.execute("PRAGMA journal_mode = WAL")
    # The segments are the truth, and an index that lost its end in a power cut catches up. With OFF it would
    # lose pages in its middle, too, and then rows, in silence.
    index.execute("PRAGMA synchronous = NORMAL")
    return index


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
