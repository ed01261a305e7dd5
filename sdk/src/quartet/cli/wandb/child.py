"""The process that speaks to Weights & Biases: `python -m quartet.cli.wandb.child PLAN.json | check`.

The library waits, retries, prints and ends the interpreter as it sees fit; here it can, and neither the run
nor its terminal hears of it.

1. A line on stdin is an Ending. The end of stdin ends the process, within the plan's `finish_seconds`: it
   does not outlive who started it by more.
2. Stdout has one JSON object for each thing that happened, {"state": ..., "said": ...}: LOGGING (connected;
   the address of the run), DONE (everything there), FAILED (why). What the library prints goes to stderr.
3. A point's number is the library's step. What Weights & Biases has of an earlier process is not sent again,
   and nothing after it is left out. The x-axis is the run's own step, which an evaluation shares with others.
4. With `check`, nothing is sent: FAILED says why it could not be, DONE that it could.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import tempfile
import threading
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from quartet.cli.points import Lines, Point, points
from quartet.cli.wandb.rows import COLUMNS, EVAL_TABLE, STEP_TABLE, table_is_due, table_of

LOGGING, DONE, FAILED = "logging", "done", "failed"
POLL_SECONDS = 0.5
#: For the answer of a server; the process is started again when it has none.
INIT_SECONDS = 30.0
#: What `check` says of the two things that a person can mend.
NO_PACKAGE, NO_KEY = "not installed", "no key"


@dataclass(frozen=True)
class Plan:
    """What is to be reported, and as what."""

    folder: str
    run_id: str
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
    finish_seconds: float = 0.0


@dataclass(frozen=True)
class Ending:
    """How the run ended."""

    exit_code: int
    summary: dict[str, Any]

    def line(self) -> str:
        """As it is sent."""
        return json.dumps(asdict(self)) + "\n"


#: Weights & Biases calls a run with this code "killed": it can be gone on with.
STOPPED_CODE = 255
UNKNOWN = Ending(STOPPED_CODE, {})


class Told:
    """The words on stdout."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __call__(self, state: str, said: str = "") -> None:
        print(json.dumps({"state": state, "said": said}), file=self._out, flush=True)


class Instructions:
    """What comes on stdin."""

    def __init__(self, stdin: TextIO, finish_seconds: float, told: Told) -> None:
        self.over = threading.Event()
        self.ending = UNKNOWN
        self._stdin = stdin
        self._finish_seconds = finish_seconds
        self._told = told
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._stdin:
            self.ending = Ending(**json.loads(line))
        # Whoever started this may be dead, and the library may wait for a server for hours.
        limit = threading.Timer(self._finish_seconds, self._too_late)
        limit.daemon = True
        limit.start()
        self.over.set()

    def _too_late(self) -> None:
        self._told(FAILED, f"it took longer than {self._finish_seconds:.0f} s")
        os._exit(1)


def report(plan: Plan, instructions: Instructions, told: Told) -> None:
    """Log until the run ended. Raises what the library raises."""
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
    lines = Lines(folder / "metrics.jsonl")
    while True:
        over = instructions.over.is_set()  # asked before reading: what was written before is read
        for point in points(lines):
            if point.number >= first:
                _log(run, point, _tables(point, plan, folder, table))
        if stopped.is_set():
            raise RuntimeError("it was stopped, by its server or from its page")
        if over:
            return
        instructions.over.wait(POLL_SECONDS)


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
    import wandb

    if not wandb.login(verify=False, prompt=False):
        raise PermissionError(NO_KEY)


def main(arguments: list[str]) -> int:
    """The process."""
    told = Told(os.fdopen(os.dup(sys.stdout.fileno()), "w"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        if arguments == ["check"]:
            check()
        else:
            # First of all, and so last of all: the library leaves its temporary files until then.
            atexit.register(_leave_nothing)
            plan = Plan(**json.loads(Path(arguments[0]).read_text()))
            report(plan, Instructions(sys.stdin, plan.finish_seconds, told), told)
    except Exception as error:  # noqa: BLE001 - whatever it is, who started this decides
        told(FAILED, _words(error))
        traceback.print_exc()
        # At an orderly exit the library would go on with what has failed.
        os._exit(1)
    told(DONE)
    return 0


def _leave_nothing() -> None:
    """Whoever made the folder of temporary files for this process may be dead."""
    with contextlib.suppress(OSError):
        os.rmdir(tempfile.gettempdir())


def _words(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "wandb":
        return NO_PACKAGE
    if isinstance(error, PermissionError):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
