"""What the output folder of a run says of it, whether the run has ended, goes on or was killed.

1. Nothing is written, locked or cut off: a run that goes on does not notice (its metrics: measured_lines.py).
2. A folder of `quartet watch` says what was measured, and no settings; how the run ended where it was
   followed so far.
3. Keys and passwords among the settings are not shown (wandb/withheld.py).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quartet.cli import follow, job
from quartet.cli.elsewhere.withheld import withheld
from quartet.cli.measured_lines import Row, measured_lines
from quartet.cli.progress import Progress
from quartet.cli.summary import SUMMARY, summary_of
from quartet.config import ConfigError
from quartet.run.config import RunConfig, parse_run
from quartet.run.written_out import written_out

#: What the record of a fine-tuning has (sft/place.py), and that of a run has not.
OF_SFT: Final = "contents of data"
#: A name for others of the settings.
PRESET: Final = "algorithm.preset"


@dataclass(frozen=True)
class Recorded:
    """A run as its folder has it."""

    folder: Path
    run_id: str
    #: Empty where the run came to no end, and of `quartet watch` where it was not followed to one.
    summary: Row
    #: By dotted key; None where the folder has none.
    settings: dict[str, Any] | None
    #: The same with the run's defaults (run/written_out.py), and the name of its preset; None where the
    #: folder has no settings, or those of another release.
    written_out: dict[str, Any] | None
    #: By their numbers.
    steps: dict[int, Row]
    #: By the steps before them.
    evaluations: dict[int, Row]
    #: The environments of its evaluations with their arguments, as JSON; None where the folder has no
    #: settings, or those of another release.
    measured_on: frozenset[str] | None

    @property
    def last_step(self) -> int:
        """The last one that was written down."""
        return max(self.steps, default=0)

    @property
    def end(self) -> Row:
        """The summary where it is that of the last step; that of a stop is outdated once the run went on."""
        return self.summary if self.summary.get("steps", -1) >= self.last_step else {}

    @property
    def stands(self) -> str:
        """Where the run stands, as far as the folder says."""
        if "steps" not in self.summary:
            return "no end yet" if self.steps or self.evaluations else "nothing yet"
        return str(self.end.get("phase", "goes on"))

    @property
    def progress(self) -> Progress:
        """What a figure is drawn of."""
        progress = Progress()
        for step, row in sorted(self.steps.items()):
            progress.add_step(step, row)
        for step, row in sorted(self.evaluations.items()):
            progress.add_eval(step, row)
        return progress


def recorded(folder: Path) -> Recorded:
    """Reads the folder. Raises ConfigError where it is no run's, or damaged."""
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is no folder; name the output folder of a run")
    known = next((folder / name for name in (job.RECORD, follow.RECORD) if (folder / name).is_file()), None)
    if known is None:
        runs = sorted(str(file.parent) for file in folder.glob(f"*/{job.RECORD}"))
        inside = f"it holds those of runs, such as {runs[0]!r}" if runs else "name one of 'quartet rl'"
        raise ConfigError(f"{str(folder)!r} is no run's output folder (it has no {job.RECORD}); {inside}")
    try:
        record = json.loads(known.read_text())
        run_id = str(record["run_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{known} cannot be read ({error}); put it back, or leave the run out") from error
    if OF_SFT in record:
        raise ConfigError(f"{str(folder)!r} is the folder of a fine-tuning; name one of 'quartet rl'")
    run, settings = _settings(folder, record)
    steps: dict[int, Row] = {}
    evaluations: dict[int, Row] = {}
    for row in measured_lines(folder):
        (evaluations if "eval/reward" in row or "eval/coverage" in row else steps)[int(row["step"])] = row
    if known.name == follow.RECORD:
        summary = _checked(known, record.get(follow.END, {}))
    else:
        summary = _checked(folder / SUMMARY, summary_of(folder))
    return Recorded(
        folder,
        run_id,
        summary,
        settings,
        None if run is None else _written_out(run),
        steps,
        evaluations,
        None if run is None else _measured_on(run),
    )


def _checked(file: Path, found: Any) -> Row:
    """The summary that a file has."""
    if not (
        isinstance(found, dict)
        and isinstance(found.get("steps", 0), int)
        and _are_environments(found.get("environments", []))
    ):
        raise ConfigError(f"{file} has no summary of a run; put it back, or remove it")
    return found


def _are_environments(told: Any) -> bool:
    return isinstance(told, list) and all(
        isinstance(one, dict) and "name" in one and isinstance(one.get("later_digests", []), list)
        for one in told
    )


def _settings(folder: Path, record: Row) -> tuple[RunConfig | None, dict[str, Any] | None]:
    """The run, where it is of this release; and its settings and those of its services, as far as this
    release knows the keys with their defaults."""
    file = folder / job.RUN_FILE
    try:
        toml = file.read_text(encoding="utf-8") if file.is_file() else record.get("config_toml")
        if toml is None:
            return None, None
        run, told = _parsed(toml)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); put it back, or leave the run out") from error
    return run, dict(_by_keys(withheld(told)))


def _written_out(run: RunConfig) -> dict[str, Any]:
    """With all that the run leaves out."""
    whole = dict(_by_keys(withheld(written_out(run).model_dump(mode="json", exclude_none=True))))
    return whole | {PRESET: run.algorithm.preset}


def _measured_on(run: RunConfig) -> frozenset[str]:
    """Where it evaluates."""
    hosted = [trial.hosted for trial in run.eval.trials(run.env, run.sampling)]
    return frozenset(
        json.dumps([one.id, withheld(one.model_dump(mode="json")["args"])], sort_keys=True) for one in hosted
    )


def _parsed(toml: str) -> tuple[RunConfig | None, Row]:
    try:
        run = parse_run(toml)
    except ConfigError:  # of another release
        told: Row = json.loads(json.dumps(tomllib.loads(toml), default=str))  # TOML has dates
        return None, told
    return run, run.model_dump(mode="json", exclude_none=True)


def _by_keys(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key; a list of plain values is one."""
    if isinstance(value, dict):
        inner = [(str(key), one) for key, one in value.items()]
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        inner = [(str(at), one) for at, one in enumerate(value)]
    else:
        yield prefix, value
        return
    for key, one in inner:
        yield from _by_keys(one, f"{prefix}.{key}" if prefix else key)
