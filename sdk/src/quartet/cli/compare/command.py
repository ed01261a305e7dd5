"""`quartet compare FOLDER FOLDER [...]`: a table of runs, from their output folders, ended or going on.

1. It asks no service and changes nothing in the folders.
2. --json has the same rows with their numbers as they are, and null where a run has none; and the remarks.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from quartet.cli.compare.folders import Recorded, recorded
from quartet.cli.compare.rows import SETTINGS, Line, lines, remarks
from quartet.cli.extras import need
from quartet.cli.outputs import write_json
from quartet.cli.rounded import rounded
from quartet.config import ConfigError
from quartet.config.refusals import together
from quartet.kit.standard_streams import shown

DESCRIPTION = """\
Compare runs by their output folders: settings that differ, rewards at equal steps, what it took.

  quartet compare outputs/first outputs/second
  quartet compare outputs/sweep-* --json sweep.json --plot sweep.png
"""
#: A table of more columns is not read; --json would take them, and so does a loop.
MAX_RUNS: Final = 16
#: Longer settings, such as a list of stops, lose their end in the table.
MAX_CELL: Final = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="output folder of a run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the rewards over the steps")


def run(options: argparse.Namespace) -> int:
    """The command. Errors: ConfigError."""
    from quartet.cli.eval.board import print_table

    runs = _read(options.folders)
    names, rows, told = _names(runs), lines(runs), remarks(runs)
    if options.plot is not None:
        need("matplotlib")
        _draw(options.plot, dict(zip(names, runs, strict=True)))
    if options.json is not None:
        write_json(options.json, _as_json(names, runs, rows, told))
    print_table(table(names, rows))
    for remark in told:
        print(remark)
    return 0


def _read(folders: Sequence[Path]) -> list[Recorded]:
    if not 2 <= len(folders) <= MAX_RUNS:
        raise ConfigError(f"name 2 to {MAX_RUNS} output folders of runs, not {len(folders)}")
    twice = [one for at, one in enumerate(folders) if one.resolve() in [b.resolve() for b in folders[:at]]]
    if twice:
        raise ConfigError(f"{str(twice[0])!r} is named twice; name each run once")
    found, refusals = [], []
    for folder in folders:
        try:
            found.append(recorded(folder))
        except ConfigError as error:
            refusals.append(error)
    if refusals:
        raise together(refusals)
    return found


def _names(runs: Sequence[Recorded]) -> list[str]:
    """Of the columns: of each folder its name, or its path where two have one name."""
    names = [run.folder.resolve().name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.folder) for name, run in zip(names, runs, strict=True)
    ]


def table(names: Sequence[str], rows: Sequence[Line]) -> Any:
    """For a person."""
    from rich.table import Column, Table
    from rich.text import Text

    found = Table(Column(), *(Column(Text(shown(name))) for name in names), box=None, padding=(0, 2))
    for section, group in groupby(rows, key=lambda row: row.section):
        found.add_row(Text(section, style="bold"))
        for row in group:
            told = _as_written if section == SETTINGS else cell
            cells = [Text(shown(told(value))) for value in row.values]
            found.add_row(Text(shown(f"  {row.name}")), *cells)
    return found


def _as_written(value: Any) -> str:
    """A setting: rounded, two that differ would look alike."""
    return cell(value if value is None or isinstance(value, str) else json.dumps(value))


def cell(value: Any) -> str:
    """A value in a table."""
    match value:
        case None:
            return "-"
        case {"reward": reward, "step": step}:
            part = f", from {value['coverage']:.0%} of its rollouts" if "coverage" in value else ""
            return f"{cell(float(reward))} (step {step}{part})"
        case dict():
            return ", ".join(f"{count} {reason}" for reason, count in sorted(value.items())) or "0"
        case float() if math.isfinite(value):
            return f"{value:.3f}" if 0.001 <= abs(value) < 1000 else rounded(value)
        case str():
            text = value
        case _:
            text = json.dumps(value)
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…"


def _as_json(
    names: Sequence[str], runs: Sequence[Recorded], rows: Sequence[Line], told: Sequence[str]
) -> dict[str, Any]:
    return {
        "runs": [
            {"name": name, "run_id": one.run_id, "folder": str(one.folder)}
            for name, one in zip(names, runs, strict=True)
        ],
        "rows": [{"section": row.section, "name": row.name, "values": list(row.values)} for row in rows],
        "remarks": list(told),
    }


def _draw(file: Path, runs: dict[str, Recorded]) -> None:
    from quartet.cli.figure import write_rewards_png

    if file.suffix.lower() != ".png":
        raise ConfigError(f"--plot {str(file)!r} is no name of a figure; end it in .png")
    write_rewards_png({name: one.progress for name, one in runs.items()}, file)
