"""`quartet rl @ run.toml`: reinforcement learning on this machine, by four services as four processes.

1. Whatever can be refused is refused before anything starts, in one sentence, with exit code 2.
2. The exit code is 0 for a completed run, 1 for a failed one, 130 for one that was stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from quartet.cli.display import Display, Plain
from quartet.cli.drive import EXIT_FAILED, EXIT_INTERRUPTED, Outcome, drive
from quartet.cli.outputs import Outputs, write_json
from quartet.cli.progress import ledger_dict, phase_name
from quartet.config import ConfigError, load
from quartet.errors import QuartetError
from quartet.local.child import ChildSpec
from quartet.local.deployment import SERVICES, check, wire, write
from quartet.local.supervisor import ServiceFailed
from quartet.local.toml_text import dumps
from quartet.run.config import RunConfig
from quartet.v1.orchestrator_service_pb2 import RUN_PHASE_COMPLETED

RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FIND_SECONDS = 60.0  # a find_spec takes milliseconds; more means a broken interpreter
PACKAGES = ("quartet", *(f"quartet-{name}" for name in SERVICES), "torch", "transformers", "grpcio")


@dataclass(frozen=True)
class Job:
    """A run and where it lives."""

    config: RunConfig
    run_id: str
    folder: Path

    @property
    def config_toml(self) -> str:
        """The run as the orchestrator gets it: without the deployment, so other ports are the same run."""
        return dumps(self.config.model_dump(mode="json", exclude=set(SERVICES), exclude_none=True))


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
    folder = (options.output_dir or default_folder(rest)).absolute()
    if options.dry_run:
        return _dry_run(config, folder, options.run_id)
    job = _claim(config, folder, options)
    try:
        specs = _prepare(job)
    except ConfigError:
        if not options.resume:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return _run_job(job, specs, started, plain=options.plain or not sys.stdout.isatty())


def _run_job(job: Job, specs: list[ChildSpec], started: float, *, plain: bool) -> int:
    outputs = Outputs(job.folder)
    display = _display(plain)
    display.say(f"run {job.run_id} in {job.folder}")
    try:
        outcome = asyncio.run(drive(specs, job.run_id, job.config_toml, outputs, display))
    except (ServiceFailed, QuartetError) as error:
        display.close()
        print(f"error: {error}\nLogs are in {job.folder / 'logs'}.", file=sys.stderr)
        return EXIT_FAILED
    display.close()
    return _finish(job, outcome, outputs, time.monotonic() - started)


def _display(plain: bool) -> Display:
    if plain:
        return Plain()
    from quartet.cli.live import LiveScreen

    return LiveScreen()


def _dry_run(config: RunConfig, folder: Path, run_id: str | None) -> int:
    """Check everything in a folder that is thrown away, and print the resolved configuration."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="quartet-dry-run-") as scratch:
        _prepare(Job(config, run_id or folder.name, Path(scratch)))
    print(config.model_dump_json(indent=2, exclude_none=True))
    return 0


def _prepare(job: Job) -> list[ChildSpec]:
    """Configs written and checked by the services themselves; environments found. Raises ConfigError."""
    tables: dict[str, dict[str, Any]] = {name: dict(getattr(job.config, name)) for name in SERVICES}
    tables["trainer"].setdefault("keep_last", job.config.ckpt.keep_last)
    wired = wire(job.config.model, job.folder / "data", tables)
    specs = write(wired, job.folder)
    asyncio.run(check(specs))
    check_environments(job.config, wired["envhost"])
    return specs


def check_environments(config: RunConfig, envhost: dict[str, Any]) -> None:
    """Every environment is installed in the interpreter that will run it. Raises ConfigError."""
    for env in config.env:
        module = env.id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
        own = envhost.get("environments", {}).get(env.id, {}).get("python")
        python = own or envhost.get("python") or sys.executable
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        done = subprocess.run([python, "-c", code], capture_output=True, timeout=FIND_SECONDS, check=False)
        if done.returncode:
            raise ConfigError(
                f"env.id = {env.id!r}: no package {module!r} in {python}; install it there, "
                f"e.g. {python} -m pip install -e environments/{module}"
            )


def model_path(model: str) -> str:
    """The absolute path of a model folder, or of a hub id's folder in the cache. Raises ConfigError."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return str(folder.absolute())
    if folder.exists():
        raise ConfigError(f"model = {model!r} has no config.json; name a Hugging Face model folder")
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    cached = hub / f"models--{model.replace('/', '--')}"
    if (main := cached / "refs" / "main").is_file():
        snapshot = cached / "snapshots" / main.read_text().strip()
        if (snapshot / "config.json").is_file():
            return str(snapshot.absolute())
    raise ConfigError(
        f"model = {model!r} is neither a folder here nor a model in the Hugging Face cache; make a small one "
        f"with 'quartet model tiny {model}', or fetch one with 'hf download {model}'"
    )


def default_folder(arguments: list[str]) -> Path:
    """outputs/<config name>-<time>."""
    files = [b for a, b in pairwise(arguments) if a == "@"]
    name = Path(files[-1]).stem if files else "run"
    return Path("outputs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _claim(config: RunConfig, folder: Path, options: argparse.Namespace) -> Job:
    """Take the output folder, or refuse with the remedy. Raises ConfigError."""
    record = folder / "run.json"
    if options.resume:
        if not record.exists():
            raise ConfigError(f"--resume: {folder} holds no run; name the folder of one with --output-dir")
        known = json.loads(record.read_text())
        job = Job(config, known["run_id"], folder)
        if known["config_toml"] != job.config_toml:
            raise ConfigError(
                f"--resume: {folder} holds the run {job.run_id!r} with another configuration; "
                f"resume it with the one in {record}, or start a new run in another --output-dir"
            )
        return job
    if folder.exists() and any(folder.iterdir()):
        if not options.overwrite:
            raise ConfigError(
                f"output folder {folder} is not empty; add --resume to go on with its run, --overwrite to "
                "delete it, or name another --output-dir"
            )
        if not record.exists():
            raise ConfigError(f"--overwrite: {folder} was not written by quartet rl; delete it yourself")
        shutil.rmtree(folder)
    run_id = options.run_id or re.sub(r"[^A-Za-z0-9_.-]", "-", folder.name)[:64]
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(f"--run-id {run_id!r} is refused: use 1 to 64 of A-Z a-z 0-9 _ . -")
    job = Job(config, run_id, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(record, {"run_id": run_id, "config_toml": job.config_toml})
    return job


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
    write_json(job.folder / "summary.json", summary)
    if run.phase == RUN_PHASE_COMPLETED:
        before, after = summary["reward_before"], summary["reward_after"]
        print(
            f"completed: reward {_shown(before)} -> {_shown(after)} in {run.step} steps, {wall_seconds:.0f} s"
        )
        print(f"checkpoint, metrics and figure: {job.folder}")
        return 0
    if outcome.interrupted:
        print(f"stopped after step {outputs.progress.step}; go on with: "
              f"quartet rl ... --output-dir {job.folder} --resume")  # fmt: skip
        return EXIT_INTERRUPTED
    print(f"error: the run is {phase_name(run.phase)}: {run.error or 'see the logs'} ({job.folder / 'logs'})",
          file=sys.stderr)  # fmt: skip
    return EXIT_FAILED


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
