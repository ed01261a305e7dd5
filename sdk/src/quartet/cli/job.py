"""A job of `quartet rl`: the run, its name, and its output folder.

1. `plan` only looks: it refuses a folder that holds something else, with the remedy, and changes nothing.
2. `taken` makes the folder the job's own for as long as the block lasts: another launcher is refused, because
   two orchestrators on one journal would lose rollouts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

from quartet.cli.outputs import write_json
from quartet.config import ConfigError
from quartet.kit.folder import lock_file
from quartet.local.deployment import SERVICES
from quartet.local.toml_text import dumps
from quartet.run.config import RunConfig
from quartet.run.name import RULE, is_run_id

RECORD = "run.json"
# Any of these is a tokenizer that transformers can load.
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Job:
    """A run and where it lives."""

    config: RunConfig
    run_id: str
    folder: Path
    resumed: bool = False

    @property
    def config_toml(self) -> str:
        """The run as the orchestrator gets it: without the deployment, so other ports are the same run."""
        return dumps(self.config.model_dump(mode="json", exclude=set(SERVICES), exclude_none=True))


def model_path(model: str) -> str:
    """The absolute path of a model folder, or of a hub id's folder in the cache. Raises ConfigError."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return _whole(model, folder)
    if folder.exists():
        raise ConfigError(f"model = {model!r} has no config.json; name a Hugging Face model folder")
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    cached = hub / f"models--{model.replace('/', '--')}"
    if (main := cached / "refs" / "main").is_file():
        snapshot = cached / "snapshots" / main.read_text().strip()
        if (snapshot / "config.json").is_file():
            return _whole(model, snapshot)
    raise ConfigError(
        f"model = {model!r} is neither a folder here nor a model in the Hugging Face cache; fetch it "
        f"with 'hf download {model}', or make a toy in that folder with 'quartet model tiny {model}'"
    )


def _whole(model: str, folder: Path) -> str:
    """The absolute path of a folder that has weights and a tokenizer. Raises ConfigError."""
    needed = {"weights (*.safetensors)": ("*.safetensors",), "tokenizer (tokenizer.json)": TOKENIZER_FILES}
    missing = [what for what, patterns in needed.items() if not any(any(folder.glob(p)) for p in patterns)]
    if missing:
        raise ConfigError(
            f"model = {model!r} has no {' and no '.join(missing)} in {folder.absolute()}; "
            "copy what is missing there, or name a whole model folder"
        )
    return str(folder.absolute())


def default_folder(arguments: list[str]) -> Path:
    """outputs/<config name>-<time>."""
    files = [b for a, b in pairwise(arguments) if a == "@"]
    name = Path(files[-1]).stem if files else "run"
    return Path("outputs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def plan(config: RunConfig, folder: Path, run_id: str | None, *, resume: bool, overwrite: bool) -> Job:
    """The job, if its folder can be taken. Raises ConfigError."""
    record = folder / RECORD
    if resume:
        return _resumed(config, folder)
    above = next((part for part in (folder, *folder.absolute().parents) if part.exists()), folder)
    if above.exists() and not above.is_dir():
        raise ConfigError(f"output folder {folder}: {above} is a file; name another --output-dir")
    if above.exists() and not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"output folder {folder}: {above} may not be written; name another --output-dir")
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            raise ConfigError(
                f"output folder {folder} is not empty; add --resume to go on with its run, --overwrite to "
                "delete it, or name another --output-dir"
            )
        if not record.exists():
            raise ConfigError(f"--overwrite: {folder} was not written by quartet rl; delete it yourself")
    run_id = run_id or re.sub(r"[^A-Za-z0-9_.-]", "-", folder.name)[:64]
    if not is_run_id(run_id):
        raise ConfigError(f"--run-id {run_id!r} is refused: {RULE}")
    return Job(config, run_id, folder)


def _resumed(config: RunConfig, folder: Path) -> Job:
    record = folder / RECORD
    if not record.exists():
        raise ConfigError(f"--resume: {folder} holds no run; name the folder of one with --output-dir")
    try:
        known = json.loads(record.read_text())
        run_id, config_toml = known["run_id"], known["config_toml"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--resume: {record} cannot be read ({error}); start a new run in another --output-dir"
        ) from error
    job = Job(config, run_id, folder, resumed=True)
    if config_toml != job.config_toml:
        raise ConfigError(
            f"--resume: {folder} holds the run {job.run_id!r} with another configuration; "
            f"resume it with the one in {record}, or start a new run in another --output-dir"
        )
    return job


@contextmanager
def taken(job: Job) -> Iterator[None]:
    """The folder, emptied unless the job goes on with it, and locked. Raises ConfigError."""
    try:
        lock = _lock(job)
    except OSError as error:
        # A read-only file system, a full disk: os.access knows neither, least of all for root.
        raise ConfigError(
            f"output folder {job.folder} cannot be written: {error.strerror}; name another --output-dir"
        ) from error
    with lock:
        yield


def _lock(job: Job) -> IO[bytes]:
    """Make the folder, lock it, begin it. Closing what is returned unlocks it."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        try:
            lock = opened.enter_context(lock_file(job.folder / ".lock"))
        except BlockingIOError:
            raise ConfigError(
                f"output folder {job.folder} belongs to a run that is going on; wait for its end, "
                "or name another"
            ) from None
        if not job.resumed:
            _empty(job.folder)
            write_json(job.folder / RECORD, {"run_id": job.run_id, "config_toml": job.config_toml})
        opened.pop_all()
    return lock


def _empty(folder: Path) -> None:
    """Delete everything in the folder but its lock."""
    for entry in folder.iterdir():
        if entry.name == ".lock":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
