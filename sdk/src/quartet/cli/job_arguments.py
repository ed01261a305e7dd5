"""What `quartet rl` and `quartet slurm` read of a command line alike, beside the run's own keys."""

from __future__ import annotations

import argparse
from pathlib import Path

from quartet.cli.begun_by import of_another_release
from quartet.cli.dialects import items
from quartet.cli.job import RECORD, RUN_FILE, as_it_was, default_folder, holds_run
from quartet.cli.run_file import RunFile, load_run
from quartet.config import ConfigError
from quartet.local.devices import ON_DEVICES
from quartet.local.wiring import SERVICES, Table
from quartet.run.config import RunConfig

#: What somebody is told who says nothing of the run.
NO_FILE = "name the run's file, as '@ run.toml'; 'quartet init FOLDER' writes some to begin with"


def add_arguments_of_a_job(parser: argparse.ArgumentParser) -> None:
    """Where a run lives, whoever starts it, and how it takes its folder."""
    parser.add_argument(
        "--output-dir", type=Path, help="folder to write to (default: outputs/<config>-<time>)"
    )
    parser.add_argument("--run-id", help="name of the run (default: the name of the output folder)")
    for service in ON_DEVICES:
        parser.add_argument(
            f"--{service}-gpus", metavar="N", help=f"GPUs of each of its machines: {service}.gpus"
        )
    parser.add_argument("--resume", action="store_true", help="go on with the run of the output folder")
    parser.add_argument("--overwrite", action="store_true", help="delete what the output folder holds first")


def keys_of_a_job(options: argparse.Namespace, rest: list[str]) -> list[str]:
    """`rest` with the keys of the run that are arguments. Raises ConfigError where two do not go together."""
    if options.resume and options.overwrite:
        raise ConfigError("--resume goes on with what --overwrite would delete; give one of the two")
    given = {service: getattr(options, f"{service}_gpus") for service in ON_DEVICES}
    return [*rest, *(f"--{service}.gpus={gpus}" for service, gpus in given.items() if gpus is not None)]


def run_and_folder(options: argparse.Namespace, rest: list[str]) -> tuple[RunFile, Path]:
    """The run of a command line, and where it is to live; one that is gone on with is what its folder says,
    where no file is named. Raises ConfigError."""
    names_a_file = any(one.file for one in items(rest))
    if options.resume and options.output_dir is not None and not names_a_file:
        if not holds_run(options.output_dir):
            raise ConfigError(how_to_resume(options.output_dir))
        begun = options.output_dir / RUN_FILE
        rest = ["@", str(begun), *rest] if begun.is_file() else rest
    try:
        found = load_run(rest, flags=options.flags)
    except ConfigError as error:
        if options.resume:
            advice = how_to_resume(options.output_dir)
            raise ConfigError(advice if str(error) in advice else f"{error}\n{advice}") from error
        if not rest:
            raise ConfigError(f"{error}\n{NO_FILE}") from error
        raise
    folder = options.output_dir or found.output_dir
    if folder is None and options.resume:
        raise ConfigError(how_to_resume(None))
    return found, folder or default_folder(rest, found.name)


def how_to_resume(folder: Path | None) -> str:
    """What somebody is told who says --resume without the folder, or without what the run is."""
    if folder is not None and not holds_run(folder):
        newest = _newest_in(folder)
        instead = "name the folder of one, or leave --resume out" if newest is None else f"name {newest}"
        return f"--resume: {folder} holds no run; {instead}"
    if folder is not None and (why := _refused(folder / RUN_FILE)):
        return f"--resume: {of_another_release(folder / RECORD, why)}; go on with that"
    if folder is not None:
        return f"--resume wants the keys that the run began with{as_it_was(folder)}"
    newest = _newest_in(Path("outputs"))
    such_as = f"; the newest of outputs/ goes on{as_it_was(newest)}" if newest else ""
    return f"--resume: name the folder of the run with --output-dir{such_as}"


def _refused(file: Path) -> str:
    """What is wrong with what a run was begun with, by itself; empty where nothing is, or it is not there."""
    if not file.is_file():
        return ""
    try:
        load_run(["@", str(file)])
    except ConfigError as error:
        return str(error)
    return ""


def _newest_in(folder: Path) -> Path | None:
    """The run that was begun last in the folders of a folder."""
    runs = [file.parent for file in folder.glob(f"*/{RUN_FILE}")]
    return max(runs, key=lambda run: (run / RUN_FILE).stat().st_mtime, default=None)


def own_tables(config: RunConfig) -> dict[str, Table]:
    """What the run says of its services."""
    return {name: getattr(config, name) for name in SERVICES}
