"""Keeps a process that reports a run to Weights & Biases (child.py), and never waits for it.

1. Nothing of it ends or delays the run: it reads the output folder by itself, is only looked at, and is
   started again, ever more rarely, when it ended. A person hears of that once, and once more when it works.
2. The end waits for `finish_seconds`, not longer. What is missing there then is in the folder, and comes when
   the folder is reported again.
3. Of the files that it makes, what is not a log is in `wandb/` of the folder (process.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quartet.cli.outputs import PRIVATE, write_json
from quartet.cli.points import Lines
from quartet.cli.wandb.child import FAILED, NO_KEY, NO_PACKAGE, UNKNOWN, Ending, Plan
from quartet.cli.wandb.process import CHILD, PLAN, Process, environment_of
from quartet.cli.wandb.withheld import withheld
from quartet.config import ConfigError
from quartet.run.wandb import WandbConfig
from quartet.v1.orchestrator_service_pb2 import Run

#: A child that ended is started again after so long, then after twice as long, ...
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 5.0, 300.0
#: At the end of a run, for the last points and its summary; the services have ended by then.
FINISH_SECONDS = 30.0
#: For a whole run, by somebody who asked for nothing else.
CATCH_UP_SECONDS = 600.0
#: The import alone takes seconds on a loaded machine.
CHECK_SECONDS = 60.0
#: Of the run's name in its id there; the whole may have 64.
MAX_NAME = 48
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def check(config: WandbConfig) -> None:
    """Whether the run can be reported from here; nothing is sent. Raises ConfigError."""
    if (lacking := lacks(config)) is not None:
        raise ConfigError(
            f"wandb.project = {config.project!r} is set, and {lacking.why}; {lacking.remedy}, or "
            f"{lacking.instead}"
        )


@dataclass(frozen=True)
class Lacking:
    """Why a run cannot be reported from here, and what to do: about that, or to the run's file."""

    why: str
    remedy: str
    instead: str


def lacks(config: WandbConfig) -> Lacking | None:
    """What there is not here that reporting needs; nothing is sent."""
    mode = config.mode_in(os.environ)
    if mode == "disabled":
        return None
    with tempfile.TemporaryDirectory(prefix="quartet-wandb-") as scratch:
        # The key's owner would be asked for, over the network, for as long as there is none.
        environment = environment_of(Path(scratch), scratch) | {"WANDB_X_DISABLE_VIEWER": "true"}
        command, limit = [*CHILD, "check"], CHECK_SECONDS
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=environment,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return None  # no reason to refuse a run
    words = [json.loads(line) for line in done.stdout.splitlines()]
    said = words[-1]["said"] if words and words[-1]["state"] == FAILED else ""
    if said == NO_PACKAGE:
        return Lacking(
            "wandb is not installed", "in the repository: pip install './sdk[wandb]'", "remove [wandb]"
        )
    if done.returncode and mode == "online":
        why = "no API key is found" if said == NO_KEY else said or done.stderr.strip().rpartition("\n")[2]
        return Lacking(why, "run 'wandb login', set WANDB_API_KEY", 'set wandb.mode to "offline"')
    return None


def id_of(run_id: str, submitted_at_ms: int) -> str:
    """The run's id there: the same wherever it is reported from, and another one for a later run that is
    called the same."""
    digits, rest = "", submitted_at_ms
    while rest:
        rest, digit = divmod(rest, len(DIGITS))
        digits = DIGITS[digit] + digits
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', run_id)[:MAX_NAME]}-{digits}"


def plan_of(config: WandbConfig, folder: Path, run: Run, *, here: bool) -> Plan:
    """How to report a run that is recorded in the folder."""
    settings = tomllib.loads(run.config_toml)
    settings.pop("wandb", None)
    return Plan(
        folder=str(folder.absolute()),
        run_id=id_of(run.run_id, run.submitted_at_ms),
        mode=config.mode_in(os.environ),
        project=config.project or "",
        name=config.name or run.run_id,
        entity=config.entity,
        group=config.group,
        tags=list(config.tags),
        config={"run_id": run.run_id, **withheld(settings)},
        completions=config.completions,
        completions_interval=config.completions_interval,
        here=here,
        finish_seconds=FINISH_SECONDS,
    )


class Reporter:
    """Reports one folder. Does nothing where the configuration asks for nothing."""

    def __init__(
        self, config: WandbConfig, folder: Path, say: Callable[[str], None], *, here: bool = True
    ) -> None:
        self._config = config
        self._on = config.mode_in(os.environ) != "disabled"
        self._folder = folder
        self._say = say
        self._here = here
        self._plan: Plan | None = None
        self._child: Process | None = None
        self._wait_seconds = FIRST_WAIT_SECONDS
        self._start_at = 0.0
        self._where = ""
        self._warned = False
        # When the present child said that it is connected.
        self._reached_at: float | None = None

    def begin(self, run: Run) -> None:
        """The run is there, and the folder has what came of it before."""
        if self._on and self._plan is None:
            self._begin(plan_of(self._config, self._folder, run, here=self._here))

    def _begin(self, plan: Plan) -> None:
        self._plan = plan
        self._start(plan)

    def _start(self, plan: Plan) -> None:
        try:
            (self._folder / PLAN).parent.mkdir(parents=True, exist_ok=True)
            write_json(self._folder / PLAN, asdict(plan), PRIVATE)
            self._child = Process(self._folder)
        except OSError as error:
            self._failed(f"its process cannot be started ({error.strerror})")

    def tick(self) -> None:
        """Look at the child, and start it again where it is time to."""
        if self._plan is None:
            return
        if self._child is None:
            if time.monotonic() >= self._start_at:
                self._start(self._plan)
            return
        self._hear(self._child)
        if self._child.ended:
            self._failed(self._child.last_words)
        elif self._reached_at is not None and time.monotonic() >= self._reached_at + self._wait_seconds:
            # Not before: what connects and then fails would be tried for ever without a pause.
            self._wait_seconds = FIRST_WAIT_SECONDS
            if self._warned:
                self._say("Weights & Biases is reached again")
                self._warned = False

    def _hear(self, child: Process) -> None:
        for where in child.reached():
            self._reached_at = time.monotonic()
            if where != self._where:
                self._where = where
                self._say(f"Weights & Biases: {where}")

    def _failed(self, why: str) -> None:
        if self._child is not None:
            self._child.close()
            self._child = self._reached_at = None
        self._start_at = time.monotonic() + self._wait_seconds
        self._wait_seconds = min(2 * self._wait_seconds, LONGEST_WAIT_SECONDS)
        if not self._warned:
            self._warned = True
            self._say(
                f"Weights & Biases takes nothing now: {why}; the run goes on, and it will be tried again"
            )

    def finish(self, ending: Ending) -> str:
        """The run ended: say so there, and wait for it, bounded. What a person should know of it."""
        plan, self._plan = self._plan, None
        if plan is None:
            return ""
        if self._child is None or self._child.ended:
            # What kept it from its work may be over.
            self._close()
            self._start(plan)
        if self._child is None:
            return _lacking("its process cannot be started")
        done = self._child.finish(ending, plan.finish_seconds)
        self._hear(self._child)
        why = self._child.last_words
        self._close()
        if not done:
            return _lacking(why)
        if plan.mode == "online":
            return f"Weights & Biases: {self._where}"
        self._forget_earlier(plan.run_id)
        return f"Weights & Biases: written down; wandb sync {self._where}"

    def _forget_earlier(self, run_id: str) -> None:
        """Each folder of an offline run holds all of it, so the newest is the one to synchronise."""
        for earlier in sorted((self._folder / "wandb").glob(f"offline-run-*-{run_id}"))[:-1]:
            shutil.rmtree(earlier, ignore_errors=True)

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def catch_up(self, run_id: str, config_toml: str, ending: Ending) -> str:
        """Report a folder whose run is over. What a person should know of it."""
        if not self._on:
            return ""
        known = _known_id(self._folder) or id_of(run_id, _began_ms(self._folder))
        plan = plan_of(self._config, self._folder, Run(run_id=run_id, config_toml=config_toml), here=False)
        self._begin(replace(plan, run_id=known, finish_seconds=CATCH_UP_SECONDS))
        return self.finish(ending)


@contextmanager
def reporting(
    config: WandbConfig, folder: Path, say: Callable[[str], None], *, here: bool = True
) -> Iterator[Reporter]:
    """A reporter that leaves nothing running, and says what there was also of a run that ended in a fault."""
    reporter = Reporter(config, folder, say, here=here)
    try:
        yield reporter
    finally:
        if last := reporter.finish(UNKNOWN):
            print(last, file=sys.stderr)


def _lacking(why: str) -> str:
    return (
        f"Weights & Biases has not everything: {why}; the files have, and what is missing there comes when "
        "the run is reported again, by the same command with --resume"
    )


def _known_id(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / PLAN).read_text())["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _began_ms(folder: Path) -> int:
    """When the first thing happened in the run."""
    times = (row["time"] for row in Lines(folder / "metrics.jsonl").new() if "time" in row)
    return int(1000 * next(times, 0))
