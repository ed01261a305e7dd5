"""The lines of metrics.jsonl, whether the run has ended, goes on or was killed.

1. Nothing is written, locked or cut off: a run that goes on does not notice.
2. A last line that is not whole is left out, as whoever goes on with the run leaves it out (outputs.py); any
   other line that is none is refused, with its number.
3. What is no number of a run (NaN, infinite, text where a number belongs) is as if it was not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from quartet.config import ConfigError

METRICS: Final = "metrics.jsonl"
#: Sums and products of smaller ones are finite, too.
MAX_NUMBER: Final = 1e100

Row = dict[str, Any]


def measured_lines(folder: Path) -> Iterator[Row]:
    """Those of an output folder, each with its "step"; none if it has none. Raises ConfigError."""
    file = folder / METRICS
    content = file.read_bytes() if file.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            int(row["step"])
            if not _is_measured(row["step"]):  # "5" and true are whole numbers to Python
                raise ValueError
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise ConfigError(
                f"{file}:{number} is no line of metrics, and not the last one, which a crash may tear; "
                "restore it, or remove the line"
            ) from None
        yield {name: value for name, value in row.items() if _is_measured(value)}


def _is_measured(value: Any) -> bool:
    """Whether it is a number, or numbers by reason."""
    if isinstance(value, dict):
        return all(map(_is_measured, value.values()))
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
