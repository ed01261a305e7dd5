"""The records of a journal, as a frame holds them.

1. A record of a kind, or with a field of its own, that this release does not know is `JournalNewer`: a state
   folded without it would be another one. (What peers answered may have fields that nobody here reads.)

Pure.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError
from quartet.kit.unknown import newer_field
from quartet.v1 import journal_pb2 as jpb

from quartet_orchestrator.segments import JournalCorrupt

# The kinds of record that WatchRun shows.
EVENTS: Final = frozenset({"rollout", "step", "eval_rollout", "eval", "phase", "note", "changed", "met"})


class JournalNewer(JournalCorrupt):
    """A newer release wrote it. str() names the record."""


def parse(payload: bytes) -> jpb.JournalRecord:
    """The record in a whole frame. Raises JournalCorrupt."""
    try:
        record = jpb.JournalRecord.FromString(payload)
    except DecodeError as error:
        raise JournalCorrupt(f"a whole frame holds no record: {error}") from error
    kind = record.WhichOneof("kind")
    newer = newer_field(record) or (newer_field(getattr(record, kind)) if kind else None)
    if newer is not None:
        raise JournalNewer(f"record {record.number} has {newer}, which this release does not know")
    if kind is None:
        raise JournalCorrupt(f"record {record.number} is of no kind")
    return record
