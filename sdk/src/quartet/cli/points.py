"""What is told of a run elsewhere, read off its output folder (quartet.cli.outputs).

1. One line of metrics.jsonl is one point. Its number is that of its event, so it is the same point whoever
   reads the folder, and however often.
2. A line is taken once it is whole; one that is no row is passed over.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
#: Read at a time; a run of years has some hundred megabytes.
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Point:
    """What is logged at once."""

    #: Of its event: 1, 2, 3, ... with gaps.
    number: int
    at_seconds: float
    step: int
    values: dict[str, float]
    is_eval: bool

    @property
    def conversations(self) -> str:
        """The file in the folder that has its rollouts."""
        return f"rollouts/{'eval' if self.is_eval else 'step'}_{self.step:04d}.jsonl"


def point_of(row: Row) -> Point:
    """A line of metrics.jsonl. Mappings are spread over names: "ledger/discarded/no_spread"."""
    values: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            values |= {f"{name}/{key}": one for key, one in value.items()}
        elif name not in ("event", "time"):
            values[name] = value
    return Point(row["event"], row["time"], row["step"], values, "policy_version" in row)


class Lines:
    """The lines of a file that grows."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = 0

    def new(self) -> Iterator[Row]:
        """Those that have become whole since."""
        try:
            with self._file.open("rb") as lines:
                lines.seek(self._read)
                while batch := lines.readlines(CHUNK_BYTES):
                    for line in batch:
                        if not line.endswith(b"\n"):
                            return
                        self._read += len(line)
                        if (row := _row(line)) is not None:
                            yield row
        except FileNotFoundError:
            return


def points(lines: Lines) -> Iterator[Point]:
    """Those of lines that have become whole since."""
    for row in lines.new():
        if row.keys() >= {"event", "time", "step"}:  # else it is no line of a launcher's
            yield point_of(row)


def _row(line: bytes) -> Row | None:
    """What a launcher wrote; nothing where a disk or a person changed it."""
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        print(f"passed over: {line[:80]!r}", file=sys.stderr)
        return None
    return row
