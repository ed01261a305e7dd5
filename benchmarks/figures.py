"""Figures: what a benchmark prints and writes.

1. A figure has a name, a value, a unit, a bar and whether the value meets the bar; `ok` is None where there
   is no bar.
2. Every benchmark prints a table and, with `--json FILE`, writes `{"figures": [...]}`.
3. A figure that misses its bar is reported as it is; the exit code stays 0, because a benchmark measures,
   it does not judge.
"""

from __future__ import annotations

import argparse
import json
import operator
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

COMPARISONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True)
class Figure:
    """One measured value. `bar` is text such as "<= 180"; empty where the figure only informs."""

    name: str
    value: float
    unit: str
    bar: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether the value meets the bar."""
        if not self.bar:
            return None
        sign, limit = self.bar.split()
        return bool(COMPARISONS[sign](self.value, float(limit)))


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser that knows `--json FILE`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def report(figures: Sequence[Figure], json_file: Path | None, **context: object) -> None:
    """Print the table and write the file."""
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        verdict = {True: "ok", False: "MISSED", None: ""}[figure.ok]
        print(f"{figure.name:<{width}}  {figure.value:>14.6g} {figure.unit:<12} {figure.bar:<10} {verdict}")
    if json_file is not None:
        rows = [{**asdict(figure), "ok": figure.ok} for figure in figures]
        machine = {"machine": platform.machine(), "python": platform.python_version()}
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(
            json.dumps({"figures": rows, "context": {**machine, **context}}, indent=1) + "\n"
        )
