"""`quartet export FOLDER TARGET`: the model of a run's newest saved state, of another, or of the one that was
evaluated best (best.py), of those that are kept. With `--orchestrator` the model of a run that is elsewhere.

1. FOLDER is the output folder of `quartet rl` or `quartet sft`, or a run's folder of states, or one state.
2. A run that somebody else's program trains has no states: it is refused, with that reason.
3. The trainer's package does it, in place of this process: what is saved is only read, so the run may go on.
4. From elsewhere comes what the trainer exported there, as its files are (exported/fetch.py); FOLDER is then
   the run's id. What only means something of the other kind is refused.
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
from typing import Any

from quartet.cli import exits, reaching
from quartet.cli.best import evaluated_best
from quartet.cli.job import MARK, RECORD
from quartet.config import ConfigError
from quartet.counted import counted
from quartet.errors import QuartetError
from quartet.exported.fetch import fetch_model
from quartet.exported.manifest import model_bytes
from quartet.kit.standard_streams import say, shown
from quartet.v1.model_pb2 import ModelManifest, ModelPlace
from quartet.v1.orchestrator_service_pb2 import FetchRunModelRequest
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

DESCRIPTION = """\
Write the model of a saved state as a Hugging Face folder: of a run that was stopped, was killed, or goes on.

  quartet export outputs/first models/first               its newest state
  quartet export outputs/first models/first --state state-0
  quartet export outputs/first models/best --best         the one of which evaluations say the most
  quartet export STATE_DIR/first models/first             of a trainer that was started otherwise
  quartet export first models/first --orchestrator HOST:PORT    of a run that is elsewhere, and over
"""
#: What is wrong with what was asked for.
REFUSALS = frozenset({"INVALID_REQUEST", "RESOURCE_UNKNOWN", "RUN_CONFLICT"})
#: In the place of a folder that is not there.
STATES = "name the output folder of a run, or the folder of its states"
#: Of evaluations, that are shown.
MAX_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument(
        "folder",
        type=Path,
        help="output folder of `quartet rl` or `sft`, or a run's folder of states; with --orchestrator the "
        "id of a run",
    )
    parser.add_argument("target", type=Path, help="folder to write, which must not exist")
    parser.add_argument("--state", metavar="NAME", help="name of the state (default: the newest)")
    parser.add_argument(
        "--best",
        action="store_true",
        help="of the states that are kept the one that was evaluated best (by ckpt.keep_last, keep_interval)",
    )
    parser.add_argument(
        "--by",
        metavar="METRIC",
        help="--best, by this number of metrics.jsonl (default: eval/reward; of quartet sft val/loss)",
    )
    parser.add_argument(
        "--adapter", action="store_true", help="with --orchestrator: only the adapter, of a run with LoRA"
    )
    reaching.add_address(parser)


def run(options: argparse.Namespace) -> int:
    """The command. Errors: ConfigError, QuartetError."""
    if options.state is not None and (options.best or options.by is not None):
        raise ConfigError("--state names a state, --best and --by choose one; say one or the other")
    if options.orchestrator is not None:
        if options.best or options.by is not None:
            raise ConfigError(
                "--best and --by go by the metrics in an output folder; name a state with --state"
            )
        return reaching.run(_fetched, options, [])
    if options.adapter:
        raise ConfigError("--adapter is for --orchestrator; what is written here has it in adapter/")
    versions = None
    if options.best or options.by is not None:
        # What is no folder of a run is refused as that, and not for want of evaluations.
        states_of(options.folder)
        _check_has_metrics(options.folder)
        metric, ranked = evaluated_best(options.folder, options.by)
        best = ", ".join(map(str, ranked[:MAX_SHOWN]))
        say(f"{metric}, the best first: {best}{', ...' if len(ranked) > MAX_SHOWN else ''}", sys.stdout)
        versions = [one.version for one in ranked]
    # This process becomes it: what signals do, it does.
    os.execv(sys.executable, export_command(options.folder, options.target, options.state, versions))


async def _fetched(stub: OrchestratorServiceStub, options: argparse.Namespace, rest: list[str]) -> int:
    """The model as the trainer exported it."""

    def begin(resume: ModelPlace | None) -> Any:
        request = FetchRunModelRequest(
            run_id=str(options.folder), state=options.state or "", adapter=options.adapter, resume=resume
        )
        return stub.FetchRunModel(request)

    telling = _Telling()
    try:
        await fetch_model(begin, options.target, telling)
    except QuartetError as error:
        if error.reason not in REFUSALS:
            raise
        raise ConfigError(error.message) from error
    print(f"{options.target}: {telling.what}")
    return exits.DONE


class _Telling:
    """Says on stderr how a fetch goes."""

    what = ""

    def begins(self, manifest: ModelManifest) -> None:
        """What comes, which may take a while."""
        state, size = shown(manifest.state), model_bytes(manifest)
        self.what = (
            f"the model of state {state}, policy version {manifest.policy_version}: "
            f"{counted(len(manifest.files), 'file')}, {size / 1e6:.1f} MB"
        )
        say(f"fetching {self.what}", sys.stderr)

    def tore(self, why: QuartetError, place: ModelPlace) -> None:
        """A line for each time."""
        at = f"byte {place.offset} of {place.path}"
        say(f"broken off, goes on from {at}: {why.message}", sys.stderr)


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


def _check_has_metrics(folder: Path) -> None:
    """Refuse what evaluations are not beside, though it may have states. Errors: ConfigError."""
    is_state = (folder / MARK).is_file()
    if (folder / RECORD).is_file() and not is_state:
        return
    if is_state:
        what = "is one saved state"
    elif any(folder.glob(f"*/{MARK}")):
        what = "is a folder of saved states"
    else:
        what = f"is no output folder: it has no {RECORD}"
    raise ConfigError(
        f"{str(folder)!r} {what}; --best and --by go by the evaluations in an output folder of quartet rl or "
        "sft: name that, or a state with --state"
    )


def states_of(folder: Path, instead: str = f"{STATES}; one elsewhere: --orchestrator HOST:PORT") -> Path:
    """Where a run's states are; `instead`: what to do where there is no such folder. Errors: ConfigError."""
    if not folder.is_dir():
        beside = [one.name for one in folder.parent.glob("*") if one.is_dir()]
        close = [str(folder.with_name(one)) for one in difflib.get_close_matches(folder.name, beside, n=1)]
        meant = f"did you mean {close[0]!r}?" if close else instead
        raise ConfigError(f"{str(folder)!r} is no folder; {meant}")
    runs = sorted(record.parent for record in folder.glob(f"*/{RECORD}"))
    if runs and not any(folder.glob(f"*/{MARK}")) and not (folder / RECORD).is_file():
        raise ConfigError(f"{str(folder)!r} is no run's folder; did you mean {str(runs[0])!r}?")
    record, trainer = folder / RECORD, folder / "config" / "trainer.toml"
    if (folder / MARK).is_file() or not record.is_file():
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
