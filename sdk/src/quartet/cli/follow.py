"""`quartet watch`: follows a run of an orchestrator that is elsewhere, on the terminal; where that is asked
for, into a folder, and from there to Weights & Biases, MLflow or TensorBoard.

1. The folder is that of `quartet rl`, as far as it comes of events: metrics.jsonl and rollouts/. Followed
   again into the same folder, no line is lost and none is written twice.
2. Of a run that has ended the whole history is recorded, also where it had been stopped and resumed; and in
   watched.json, beside which run the folder is of, how it ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tomllib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quartet.cli import exits
from quartet.cli.display import Plain, event_line
from quartet.cli.elsewhere.child import STOPPED_CODE, Ending
from quartet.cli.held import LOCK, held
from quartet.cli.outputs import Outputs, write_json
from quartet.cli.progress import Progress, ledger_dict, phase_name
from quartet.cli.reporting import Reporters, check, is_shown, reporting
from quartet.cli.watch import all_events, run_as_it_stands, started_again
from quartet.config import Config, ConfigError, load
from quartet.config.load import Draft, merged
from quartet.config.once import reads_once
from quartet.kit.folder import check_folder
from quartet.kit.standard_streams import say as told
from quartet.local.toml_text import inline
from quartet.run.mlflow import MlflowConfig
from quartet.run.tensorboard import TensorboardConfig
from quartet.run.wandb import WandbConfig
from quartet.v1.orchestrator_service_pb2 import Run
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

PATIENCE_SECONDS = 600.0  # a pod that is moved to another node fetches its image first
TICK_SECONDS = 0.5
RECORD = "watched.json"
#: Of the record: what the run came to, as far as it was followed to an end.
END = "end"


class WatchConfig(Config):
    """What is said of following, beside which run and where."""

    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Besides those of every client."""
    parser.add_argument("--after-event", type=int, default=0, help="leave out events up to this number")
    parser.add_argument("--output-dir", type=Path, help="record metrics.jsonl and rollouts/ in this folder")
    parser.add_argument(
        "--keep-rollouts",
        type=int,
        metavar="STEPS",
        help="of so many of the newest steps, and evaluations (default: of all)",
    )
    parser.add_argument(
        "--wandb",
        action="store_true",
        help="report to Weights & Biases, as the run's [wandb] says, and --wandb.project NAME, --wandb.mode "
        "offline, ... (folder: outputs/watched/RUN)",
    )
    parser.add_argument(
        "--mlflow",
        action="store_true",
        help="tell MLflow of it, as the run's [mlflow] says, and --mlflow.experiment NAME, ... (folder: "
        "outputs/watched/RUN)",
    )
    parser.add_argument(
        "--tensorboard",
        action="store_true",
        help="write event files of TensorBoard into the folder (outputs/watched/RUN)",
    )


async def watch(stub: OrchestratorServiceStub, options: argparse.Namespace, rest: list[str]) -> int:
    """One line for each event until the run ends."""
    if not 0 <= options.after_event < 2**63:
        raise ConfigError(f"--after-event {options.after_event} is refused; give the number of an event")
    keep: int | None = options.keep_rollouts
    if keep is not None and keep < 1:
        raise ConfigError(f"--keep-rollouts {keep} is refused; give a number of steps from 1 on")

    def say(text: str) -> None:
        told(text, sys.stderr)

    run = await run_as_it_stands(stub, options.run, patience_s=PATIENCE_SECONDS, say=say)
    run = await started_again(stub, run, say=say)
    config = shown_as(
        run,
        rest,
        wandb=options.wandb,
        mlflow=options.mlflow,
        tensorboard=options.tensorboard,
        flags=options.flags,
    )
    folder: Path | None = options.output_dir
    if is_shown(config):
        folder = folder or Path("outputs/watched") / run.run_id
    if folder is None:
        if keep is not None:
            raise ConfigError("--keep-rollouts is about what --output-dir records; give that, too")
        return await _shown(stub, run, options.after_event)
    if options.after_event:
        raise ConfigError("--after-event leaves out events, and the folder is to have all; remove it")
    check_folder("--output-dir", folder)
    check(config)
    with taken(folder, run):
        return await _recorded(stub, run, Outputs(folder.absolute(), keep), config)


def shown_as(
    run: Run,
    arguments: Sequence[str],
    *,
    wandb: bool = False,
    mlflow: bool = False,
    tensorboard: bool = False,
    flags: Collection[str] = (),
) -> WatchConfig:
    """Where it is shown: as is said here, and where [wandb] or [mlflow] is asked for over
    what the run's own says."""
    read = reads_once()
    said = merged(WatchConfig, [*arguments], Draft(flags=flags, read=read)).values
    asked = [name for name, flag in (("wandb", wandb), ("mlflow", mlflow)) if flag or name in said]
    own = tomllib.loads(run.config_toml)
    before = [f"--{name}.{key}={inline(value)}" for name in asked for key, value in own.get(name, {}).items()]
    if tensorboard:
        before.append("--tensorboard.enabled=true")
    config = load(WatchConfig, [*before, *arguments], Draft(flags=flags, read=read)).config
    if "wandb" in asked and config.wandb.project is None:
        raise ConfigError("--wandb: the run names no project of Weights & Biases; add --wandb.project NAME")
    if "mlflow" in asked and config.mlflow.experiment is None:
        raise ConfigError("--mlflow: the run names no experiment of MLflow; add --mlflow.experiment NAME")
    return config


async def _shown(stub: OrchestratorServiceStub, run: Run, after_event: int) -> int:
    progress, display = Progress(), Plain(submitted_at_ms=run.submitted_at_ms)
    progress.begin(run)
    async for event in all_events(
        stub, run, after_event, include_rollouts=False, patience_s=PATIENCE_SECONDS, say=display.say
    ):
        if progress.apply(event) and event_line(event, progress):
            display.event(event, progress)
        if not display.is_read:
            return exits.FAILED
    return exits.of_run(progress.run)


async def _recorded(stub: OrchestratorServiceStub, run: Run, outputs: Outputs, config: WatchConfig) -> int:
    folder, display = outputs.folder, Plain(submitted_at_ms=run.submitted_at_ms)
    outputs.progress.begin(run)
    display.say(f"run {run.run_id} is recorded in {folder}")
    with reporting(config, folder, display.say, here=False) as reporter:
        reporter.begin(run)
        ticks = asyncio.create_task(_tick(reporter))
        try:
            async for event in all_events(
                stub,
                run,
                outputs.progress.last_event,
                include_rollouts=True,
                patience_s=PATIENCE_SECONDS,
                say=display.say,
            ):
                if outputs.record(event):
                    display.event(event, outputs.progress)
        finally:
            ticks.cancel()
        last = outputs.progress.run
        ending = ending_of(last)
        write_json(folder / RECORD, _record(run) | {END: ending.summary})
        if shown := await asyncio.to_thread(reporter.finish, ending):
            display.say(shown)
    return exits.of_run(last)


async def _tick(reporter: Reporters) -> None:
    while True:
        reporter.tick()
        await asyncio.sleep(TICK_SECONDS)


def ending_of(run: Run) -> Ending:
    """What is told elsewhere at the end, from the run alone."""
    summary = {
        "run_id": run.run_id,
        "phase": phase_name(run.phase),
        "reward_before": run.reward_before if run.HasField("reward_before") else None,
        "reward_after": run.reward_after if run.HasField("reward_after") else None,
        "steps": run.step,
        "rollouts": run.ledger.dispatched,
        "max_off_policy_steps_seen": run.max_off_policy_steps_seen,
        "ledger": ledger_dict(run.ledger),
    }
    return Ending(exits.code_of(run.phase, STOPPED_CODE), summary)


@contextmanager
def taken(folder: Path, run: Run) -> Iterator[None]:
    """The folder, locked, if it is new or has the same run. Raises ConfigError."""
    folder.mkdir(parents=True, exist_ok=True)
    _check(folder, run)  # before a lock is left in what is somebody else's
    refusal = f"output folder {folder} is being written by another 'quartet watch'; name another --output-dir"
    with held(folder, refusal):
        _check(folder, run)  # another may have taken it since
        if not (folder / RECORD).is_file():
            write_json(folder / RECORD, _record(run))
        yield


def _check(folder: Path, run: Run) -> None:
    """Whether the folder is new or has the same run. Raises ConfigError."""
    known = folder / RECORD
    try:
        names = [one.name for one in folder.iterdir()]
        found = known.read_bytes() if known.is_file() else b""
    except OSError as error:
        raise ConfigError(
            f"output folder {folder} cannot be read: {error.strerror}; name another --output-dir"
        ) from error
    if any(name != LOCK for name in names) and not _is_of(found, run):
        raise ConfigError(
            f"output folder {folder} holds something else than the run {run.run_id!r}; name another "
            "--output-dir"
        )


def _is_of(record: bytes, run: Run) -> bool:
    """Whether what a record says is of this run."""
    try:
        told = json.loads(record)
    except (ValueError, RecursionError):
        return False
    return isinstance(told, dict) and _record(run).items() <= told.items()


def _record(run: Run) -> dict[str, object]:
    return {"run_id": run.run_id, "submitted_at_ms": run.submitted_at_ms}
