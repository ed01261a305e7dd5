"""A file of TensorBoard's events, written with its own messages and its own writer of records, which come
from a package that nothing else here needs.

1. What is added at once is one record: a reader sees all of it or nothing, also where the file is torn.
2. A file is new: it overwrites none, and is read behind those that were there, whatever the clock says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: What the first record of a file says, and readers ask for.
VERSION = "brain.Event:2"
#: TensorBoard looks for "tfevents" in the name, and reads files in the order of their names.
NAMES = "events.out.tfevents.*"


class EventFile:
    """One, open."""

    def __init__(self, folder: Path) -> None:
        """In the folder, which is made where there is none."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        there = [path.name for path in folder.glob(NAMES)]
        newest = max(map(_stamp, there), default=0)
        name = f"{NAMES[:-1]}{max(int(time.time()), newest + 1):010d}.{len(there):05d}.quartet"
        self._file = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._record(Event(wall_time=time.time(), file_version=VERSION))

    def add(self, at_seconds: float, step: int, values: Mapping[str, float]) -> None:
        """Values of a step, by the names of their charts."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        charts = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._record(Event(wall_time=at_seconds, step=step, summary=Summary(value=charts)))

    def flush(self) -> None:
        """What was added is on the disk."""
        self._records.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing more is added."""
        self._records.close()

    def _record(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def _stamp(name: str) -> int:
    """The seconds in a file's name, which may be of another program's; 0 where it has none."""
    stamp = name.removeprefix(NAMES[:-1]).split(".")[0]
    return int(stamp) if stamp.isascii() and stamp.isdigit() else 0
