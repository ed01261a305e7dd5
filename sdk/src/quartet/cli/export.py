"""`quartet export FOLDER TARGET`: the model of a run's newest saved state, of another, or of the one that was
evaluated best (best.py), of those that are kept.

1. FOLDER is the output folder of `quartet rl` or `quartet sft`, or a run's folder of states, or one state.
2. A run that somebody else's program trains has no states: it is refused, with that reason.
3. The trainer's package does it, in place of this process: what is saved is only read, so the run may go on.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from quartet.cli.best import evaluated_best
from quartet.cli.job import RECORD
from quartet.config import ConfigError
from quartet.kit.standard_streams import say

DESCRIPTION = """\
Write the model of a saved state as a Hugging Face folder: of a run that was stopped, was killed, or goes on.

  quartet export outputs/first models/first               its newest state
  quartet export outputs/first models/first --state state-0
  quartet export outputs/first models/best --best         the one of which evaluations say the most
  quartet export STATE_DIR/first models/first             of a trainer that was started otherwise
"""
#: Of evaluations, that are shown.
MAX_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument(
        "folder", type=Path, help="output folder of `quartet rl` or `sft`, or a run's folder of states"
    )
    parser.add_argument("target", type=Path, help="folder to write, which must not exist")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--state", metavar="NAME", help="name of the state (default: the newest)")
    which.add_argument(
        "--best",
        action="store_true",
        help="of the states that are kept the one that was evaluated best (ckpt.keep_last says how many are)",
    )
    which.add_argument(
        "--by",
        metavar="METRIC",
        help="as --best, by this number of metrics.jsonl (default: eval/reward; of quartet sft val/loss)",
    )


def run(options: argparse.Namespace) -> NoReturn:
    """The command. Errors: ConfigError."""
    versions = None
    if options.best or options.by is not None:
        # What is no folder of a run is refused as that, and not for want of evaluations.
        states_of(options.folder)
        metric, ranked = evaluated_best(options.folder, options.by)
        best = ", ".join(map(str, ranked[:MAX_SHOWN]))
        say(f"{metric}, the best first: {best}{', ...' if len(ranked) > MAX_SHOWN else ''}", sys.stdout)
        versions = [one.version for one in ranked]
    # This process becomes it: what signals do, it does.
    os.execv(sys.executable, export_command(options.folder, options.target, options.state, versions))


def export_command(
    folder: Path, target: Path, state: str | None = None, versions: Sequence[int] | None = None
) -> list[str]:
    """What writes the model of a run's state: that one, or that of the first of these policy versions which
    has one, or the newest. Errors: ConfigError."""
    if importlib.util.find_spec("quartet_trainer") is None:
        raise ConfigError("quartet_trainer is not installed here; export where the trainer is")
    command = [sys.executable, "-m", "quartet_trainer.export"]
    command += [] if state is None else ["--state", state]
    command += [] if versions is None else ["--versions", ",".join(map(str, versions))]
    return [*command, "--", str(states_of(folder)), str(target)]


def states_of(folder: Path) -> Path:
    """Where a run's states are. Errors: ConfigError."""
    if not folder.is_dir():
        beside = [one.name for one in folder.parent.glob("*") if one.is_dir()]
        close = [str(folder.with_name(one)) for one in difflib.get_close_matches(folder.name, beside, n=1)]
        raise ConfigError(
            f"{str(folder)!r} is no folder; "
            + (f"did you mean {close[0]!r}?" if close else "name the output folder of a run, or its states'")
        )
    record, trainer = folder / RECORD, folder / "config" / "trainer.toml"
    if not record.is_file():
        return folder
    try:
        run = json.loads(record.read_text())
        run_id = str(run["run_id"])
        if tomllib.loads(run.get("config_toml", "")).get("external_trainer"):
            raise ConfigError("external_trainer = true: the weights are with the program that trains")
        own = folder / "data" / "trainer"
        if own.is_dir():  # the folder may have been moved, or be a copy, since its configuration was written
            return own / run_id
        return Path(tomllib.loads(trainer.read_text(encoding="utf-8"))["state_dir"]) / run_id
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} does not say where its run's states are ({error}); name their folder"
        ) from error
