"""`quartet rl @ run.toml`: reinforcement learning on this machine, by four services as four processes.

1. Whatever can be refused is refused before anything starts, in one sentence, with exit code 2.
2. The exit code is 0 for a completed run, 1 for a failed one, 130 for one that was stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quartet.cli.display import Display, Plain
from quartet.cli.drive import EXIT_FAILED, EXIT_INTERRUPTED, Outcome, drive
from quartet.cli.env.installed import REFUSALS, with_interpreters
from quartet.cli.job import Job, default_folder, model_path, plan, taken
from quartet.cli.outputs import Outputs, write_json
from quartet.cli.progress import ledger_dict, phase_name
from quartet.config import ConfigError, load
from quartet.errors import QuartetError
from quartet.local.child import ChildSpec
from quartet.local.deployment import SERVICES, check, wire, write
from quartet.local.supervisor import ServiceFailed
from quartet.run.config import RunConfig
from quartet.v1.orchestrator_service_pb2 import RUN_PHASE_COMPLETED, RUN_PHASE_STOPPED

SUMMARY = "summary.json"
PACKAGES = ("quartet", *(f"quartet-{name}" for name in SERVICES), "torch", "transformers", "grpcio")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that are the launcher's own; all others belong to the run's configuration."""
    parser.add_argument(
        "--output-dir", type=Path, help="folder to write to (default: outputs/<config>-<time>)"
    )
    parser.add_argument("--run-id", help="name of the run (default: the name of the output folder)")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print what would run, start nothing"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run of the output folder")
    parser.add_argument("--overwrite", action="store_true", help="delete what the output folder holds first")
    parser.add_argument(
        "--plain", action="store_true", help="one line for each step instead of the live screen"
    )


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """The command. `rest` is what argparse left: `@ file.toml --key value`."""
    started = time.monotonic()
    config = load(RunConfig, rest).config
    config = config.model_copy(update={"model": model_path(config.model)})
    envhost = with_interpreters(config.envhost, config.environment_ids)
    config = config.model_copy(update={"envhost": envhost})
    folder = (options.output_dir or default_folder(rest)).absolute()
    job = plan(config, folder, options.run_id, resume=options.resume, overwrite=options.overwrite)
    if (done := _completed_before(job)) is not None and not options.dry_run:
        _say_completed(job, done)
        return 0
    _check(job)
    if options.dry_run:
        print(config.model_dump_json(indent=2, exclude_none=True))
        return 0
    return _run_job(job, started, plain=options.plain or not sys.stdout.isatty())


def _run_job(job: Job, started: float, *, plain: bool) -> int:
    """Take the folder, run in it, write the result."""
    with taken(job):
        try:
            return _in_folder(job, started, plain=plain)
        except OSError as error:
            why = f"{error.filename or job.folder} cannot be written or read: {error.strerror or error}"
            remedy = f"mend that, then go on with: quartet rl ... --output-dir {job.folder} --resume"
            return _failed(job, f"{why}; {remedy}")


def _in_folder(job: Job, started: float, *, plain: bool) -> int:
    specs = _deploy(job, job.folder)
    outputs = Outputs(job.folder)
    with contextlib.closing(_display(plain)) as display:
        display.say(f"run {job.run_id} in {job.folder}")
        try:
            outcome = asyncio.run(drive(specs, job.run_id, job.config_toml, outputs, display))
        except QuartetError as error:
            if error.reason not in REFUSALS:
                return _failed(job, error)
            if not job.resumed:
                shutil.rmtree(job.folder)  # nothing was run: the next attempt finds no used folder
            raise ConfigError(error.message) from error
        except ServiceFailed as error:
            return _failed(job, error)
    return _finish(job, outcome, outputs, time.monotonic() - started)


def _failed(job: Job, error: Exception | str) -> int:
    print(f"error: {error}\nLogs are in {job.folder / 'logs'}.", file=sys.stderr)
    return EXIT_FAILED


def _display(plain: bool) -> Display:
    if plain:
        return Plain()
    from quartet.cli.live import LiveScreen

    return LiveScreen()


def _deploy(job: Job, folder: Path) -> list[ChildSpec]:
    """Write the services' configs for the job into a folder."""
    tables: dict[str, dict[str, Any]] = {name: dict(getattr(job.config, name)) for name in SERVICES}
    # Verifiers takes seconds to import, while the other services start.
    asked = (*job.config.env, *(trial.hosted for trial in job.config.trials))
    tables["envhost"].setdefault("preload", [{"id": one.id, "args": one.args} for one in asked])
    if job.config.external_trainer:
        del tables["trainer"]
        tables["inference"].setdefault("accept_push", True)
    else:
        tables["trainer"].setdefault("keep_last", job.config.ckpt.keep_last)
    return write(wire(job.config.model, folder / "data", tables), folder)


def _check(job: Job) -> None:
    """Let every service check its config, in a folder that is thrown away. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="quartet-check-") as scratch:
        asyncio.run(check(_deploy(job, Path(scratch))))


def _finish(job: Job, outcome: Outcome, outputs: Outputs, wall_seconds: float) -> int:
    """Write what is written at the end, and say it."""
    run = outcome.run
    summary = {
        "run_id": job.run_id,
        "phase": phase_name(run.phase),
        "reward_before": run.reward_before if run.HasField("reward_before") else None,
        "reward_after": run.reward_after if run.HasField("reward_after") else None,
        "steps": run.step,
        "wall_seconds": round(wall_seconds, 3),
        "rollouts": run.ledger.dispatched,
        "max_off_policy_steps_seen": run.max_off_policy_steps_seen,
        "max_logprob_difference": run.max_logprob_difference
        if run.HasField("max_logprob_difference")
        else None,
        "ledger": ledger_dict(run.ledger),
        "restarts": outcome.restarts,
        "seed": job.config.seed,
        "model": job.config.model,
        "versions": installed_versions(),
    }
    write_json(job.folder / SUMMARY, summary)
    if run.phase == RUN_PHASE_COMPLETED:
        _say_completed(job, summary)
        return 0
    if outcome.interrupted or run.phase == RUN_PHASE_STOPPED:
        print(f"stopped after step {outputs.progress.step}; go on with: "
              f"quartet rl ... --output-dir {job.folder} --resume\n"
              f"or write the model as it is: quartet export {job.folder} MODEL_FOLDER")  # fmt: skip
        return EXIT_INTERRUPTED
    print(f"error: the run is {phase_name(run.phase)}: {run.error or 'see the logs'} ({job.folder / 'logs'})",
          file=sys.stderr)  # fmt: skip
    return EXIT_FAILED


def _completed_before(job: Job) -> dict[str, Any] | None:
    """The summary of the run that is to be gone on with, where it has reached its end."""
    try:
        summary: dict[str, Any] = json.loads((job.folder / SUMMARY).read_text()) if job.resumed else {}
    except (OSError, ValueError):
        return None
    return summary if summary.get("phase") == phase_name(RUN_PHASE_COMPLETED) else None


def _say_completed(job: Job, summary: dict[str, Any]) -> None:
    before, after, seconds = (summary[key] for key in ("reward_before", "reward_after", "wall_seconds"))
    print(
        f"completed: reward {_shown(before)} -> {_shown(after)} in {summary['steps']} steps, {seconds:.0f} s"
    )
    kept = "metrics and figure" if job.config.external_trainer else "checkpoint, metrics and figure"
    print(f"{kept}: {job.folder}")


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "(not measured)"


def installed_versions() -> dict[str, str]:
    """Versions of what took part, from package metadata."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
