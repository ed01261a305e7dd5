"""As what a run is known elsewhere: the same wherever it is told from, and another one for a later run that
is called the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

from quartet.cli.points import Lines

#: Of the run's name in it; the whole may have 64 characters.
MAX_NAME = 48
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def id_of(run_id: str, submitted_at_ms: int) -> str:
    """Of the run and the time of its submission."""
    digits, rest = "", submitted_at_ms
    while rest:
        rest, digit = divmod(rest, len(DIGITS))
        digits = DIGITS[digit] + digits
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', run_id)[:MAX_NAME]}-{digits}"


def id_of_folder(run_id: str, folder: Path, plan: Path) -> str:
    """Of a run that is over: as its folder was told of before, or by when the first thing happened in it."""
    try:
        return str(json.loads(plan.read_text())["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        times = (row["time"] for row in Lines(folder / "metrics.jsonl").new() if "time" in row)
        return id_of(run_id, int(1000 * next(times, 0)))
