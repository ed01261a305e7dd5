"""Runs that `quartet rl` is asked for, planned and ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quartet.cli.attempt import taken
from quartet.cli.job import RECORD, Job, plan
from quartet.cli.run_file import load_run
from quartet.run.config import RunConfig, parse_run

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "reverse-text.toml"


def planned(config: RunConfig, folder: Path, run_id: str | None = None, **changes: bool) -> Job:
    return plan(config, folder, run_id, **{"resume": False, "overwrite": False, **changes})


@contextmanager
def accepted(job: Job) -> Iterator[None]:
    """Its folder, taken by a launcher whose run the orchestrator has."""
    with taken(job) as attempt:
        attempt.accepted()
        yield


def with_steps(config: RunConfig, max_steps: int) -> RunConfig:
    return config.model_copy(update={"max_steps": max_steps})


def ended(folder: Path, phase: str, steps: int) -> None:
    (folder / "summary.json").write_text(json.dumps({"phase": phase, "steps": steps, "wall_seconds": 1.0}))


def steps_of(folder: Path) -> tuple[int, int]:
    """As the folder's two records have it."""
    record = json.loads((folder / RECORD).read_text())["config_toml"]
    return parse_run(record).max_steps, load_run(["@", str(folder / "run.toml")]).config.max_steps
