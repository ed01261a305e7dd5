"""What is logged of a run, read off its output folder (quartet.cli.outputs).

1. One line of metrics.jsonl is one point. Its number is that of its event, so it is the same point whoever
   reads the folder, and however often.
2. A line is taken once it is whole; one that is no row is passed over.
3. Conversations of a step are in the folder before its line, so a table is the same whenever it is made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

Row = dict[str, Any]
#: A conversation is for a person to read; the whole of it is in the folder.
MAX_TEXT = 20_000
COLUMNS = ("step", "env", "task", "reward", "prompt", "completion")
#: Where each kind of table is logged.
STEP_TABLE, EVAL_TABLE = "completions", "eval/completions"
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


def table_is_due(point: Point, interval: int) -> bool:
    """Of every evaluation, of the first step, and of every so many."""
    return point.is_eval or point.step == 1 or point.step % interval == 0


def table_of(point: Point, folder: Path, count: int) -> list[list[Any]]:
    """So many conversations of the point's rollouts, a row of COLUMNS for each."""
    whole = (row for row in Lines(folder / point.conversations).new() if _shows_something(row))
    return [_table_row(point.step, row) for row in islice(whole, count)]


def _shows_something(row: Row) -> bool:
    return "failure" not in row and any(message["role"] == "assistant" for message in row.get("messages", ()))


def _table_row(step: int, row: Row) -> list[Any]:
    """Up to the first answer is the prompt, all else the completion."""
    messages = row["messages"]
    answered = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
    texts = (_text(messages[:answered]), _text(messages[answered:]))
    return [step, row["env"], row["task"], row["reward"], *texts]


def _text(messages: list[Row]) -> str:
    """What one message says, or the conversation of several."""
    if len(messages) == 1:
        text = _said(messages[0])
    else:
        text = "\n\n".join(f"{message['role']}: {_said(message)}" for message in messages)
    rest = len(text) - MAX_TEXT
    return text if rest <= 0 else f"{text[:MAX_TEXT]}… ({rest} more characters)"


def _said(message: Row) -> str:
    """Its text, then the tools that it calls."""
    return "\n".join(part for part in (message["content"], *message.get("tool_calls", ())) if part)
