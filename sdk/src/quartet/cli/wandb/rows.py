"""Conversations that are logged of a run, read off its output folder (quartet.cli.outputs).

1. Those of a step are in the folder before its line, so a table is the same whenever it is made.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from quartet.cli.points import Lines, Point, Row

#: A conversation is for a person to read; the whole of it is in the folder.
MAX_TEXT = 20_000
COLUMNS = ("step", "env", "task", "reward", "prompt", "completion")
#: Where each kind of table is logged.
STEP_TABLE, EVAL_TABLE = "completions", "eval/completions"


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
