"""The process that speaks to Weights & Biases: `python -m quartet.cli.wandb.child PLAN.json | check`.

It does what elsewhere/child.py says of each such process, and:

1. A point's number is the library's step. What Weights & Biases has of an earlier process is not sent again,
   and nothing after it is left out. The x-axis is the run's own step, which an evaluation shares with others.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quartet.cli.elsewhere import child
from quartet.cli.elsewhere.child import LOGGING, Instructions, Told, serve
from quartet.cli.points import Point
from quartet.cli.wandb.rows import COLUMNS, EVAL_TABLE, STEP_TABLE, table_is_due, table_of
from quartet.kit.imports import uncollected

#: For the answer of a server; the process is started again when it has none.
INIT_SECONDS = 30.0
#: What `check` says where a person has to log in.
NO_KEY = "no key"


@dataclass(frozen=True, kw_only=True)
class Plan(child.Plan):
    """What is to be reported, and as what."""

    mode: str
    project: str = ""
    name: str = ""
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    completions: int = 0
    completions_interval: int = 1
    #: Whether the run's processes are on this machine, so that its load says something.
    here: bool = True


def report(file: Path, told: Told) -> None:
    """Log until the run ended."""
    plan = Plan(**json.loads(file.read_text()))
    instructions = Instructions(sys.stdin, plan.finish_seconds, told)
    with uncollected():
        import wandb

    stopped = threading.Event()

    def stop() -> None:  # a bound method could not be copied
        stopped.set()

    settings = wandb.Settings(
        console="off",
        disable_git=True,
        disable_job_creation=True,
        finish_timeout=plan.finish_seconds,
        finish_timeout_raises=True,
        init_timeout=INIT_SECONDS,
        program="quartet",
        save_code=False,
        stop_fn=stop,
        stop_on_fatal_error=True,
        x_disable_stats=not plan.here,
        x_save_requirements=False,
    )
    identity: dict[str, Any] = {
        "project": plan.project,
        "name": plan.name,
        "entity": plan.entity,
        "group": plan.group,
        "tags": plan.tags,
        "id": plan.run_id,
        "mode": plan.mode,
    }
    run: Any = wandb.init(**identity, resume="allow", dir=plan.folder, settings=settings)
    run.config.update(plan.config, allow_val_change=True)
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    told(LOGGING, run.url or "" if plan.mode == "online" else str(Path(run.settings.sync_dir)))
    _follow(run, run.step, plan, instructions, stopped, wandb.Table)
    run.summary.update(instructions.ending.summary)
    run.finish(exit_code=instructions.ending.exit_code)


def _follow(
    run: Any, first: int, plan: Plan, instructions: Instructions, stopped: threading.Event, table: Any
) -> None:
    """Log points with numbers from `first` on, until there will be no more."""
    folder = Path(plan.folder)
    for looked_at in instructions.followed(folder):
        for point in looked_at:
            if point.number >= first:
                _log(run, point, _tables(point, plan, folder, table))
        if stopped.is_set():
            raise RuntimeError("it was stopped, by its server or from its page")


def _tables(point: Point, plan: Plan, folder: Path, table: Any) -> dict[str, Any]:
    """The conversations that go along, by name."""
    if not plan.completions or not table_is_due(point, plan.completions_interval):
        return {}
    rows = table_of(point, folder, plan.completions)
    name = EVAL_TABLE if point.is_eval else STEP_TABLE
    return {name: table(columns=list(COLUMNS), data=rows)} if rows else {}


def _log(run: Any, point: Point, tables: dict[str, Any]) -> None:
    values = {**point.values, "_timestamp": point.at_seconds}
    try:
        run.log(values | tables, step=point.number, commit=True)
    except Exception as error:
        if not tables:
            raise
        # A table is an upload of its own, which a server may refuse.
        print(f"no table at step {point.step}: {error}", file=sys.stderr)
        run.log(values, step=point.number, commit=True)


def check() -> None:
    """Whether there is a key; nobody is asked about it. Raises PermissionError where there is none, and what
    the library raises where it cannot be one."""
    with uncollected():
        import wandb

    if not wandb.login(verify=False, prompt=False):
        raise PermissionError(NO_KEY)


if __name__ == "__main__":
    sys.exit(serve("wandb", sys.argv[1:], check, report))
