"""Figures: what a benchmark prints and writes.

1. A figure has a name, a value, a unit, a bar and whether the value meets the bar; `ok` is None where there
   is no bar.
2. Every benchmark prints a table and, with `--json FILE`, writes `{"figures": [...], "context": {...}}`. The
   context tells what made them: the command, the commit, the day, the processor, and how busy the machine was
   when the benchmark began.
3. A figure that misses its bar is reported as it is; the exit code stays 0, because a benchmark measures,
   it does not judge.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

#: Processes that wanted a core while this one began: what it starts itself is not among them.
LOAD_BEFORE = round(os.getloadavg()[0], 2)
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
        json_file.parent.mkdir(parents=True, exist_ok=True)
        told = {"figures": rows, "context": {**made_by(), **context}}
        json_file.write_text(json.dumps(told, indent=1) + "\n")


def made_by() -> dict[str, object]:
    """What a reader needs to make the figures again, or to say why they differ."""
    return {
        "command": command(sys.argv),
        "commit": commit(Path(__file__).parent),
        "recorded": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": LOAD_BEFORE,
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def command(words: Sequence[str]) -> str:
    """The benchmark and its options, without where its figures go."""
    kept, options = [Path(words[0]).name], iter(words[1:])
    for word in options:
        if word == "--json":
            next(options)
        elif not word.startswith("--json="):
            kept.append(word)
    return shlex.join(kept)


def commit(folder: Path) -> str:
    """The commit that `folder` is of, with `+` where tracked files have changed; empty outside of git."""
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # no git here
        return ""


def processor() -> str:
    """The processor's name, as Linux tells it; elsewhere what Python knows."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
