"""Keeps a process that tells of a run elsewhere (child.py), and never waits for it.

1. Nothing of it ends or delays the run: it reads the output folder by itself, is only looked at, and is
   started again, ever more rarely, when it ended. A person hears of that once, and once more when it works.
2. The end waits for `finish_seconds`, not longer. What is missing there then is in the folder, and comes when
   the folder is reported again.
3. Of the files that it makes, what is not a log is in a folder of the output folder (process.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from quartet.cli.elsewhere.child import UNKNOWN, Ending, Plan
from quartet.cli.elsewhere.identity import id_of_folder
from quartet.cli.elsewhere.process import Place, Process, plan_file
from quartet.kit.standard_streams import say as told
from quartet.v1.orchestrator_service_pb2 import Run

#: A child that ended is started again after so long, then after twice as long, ...
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 5.0, 300.0
#: At the end of a run, for the last points and its summary; the services have ended by then.
FINISH_SECONDS = 30.0
#: For a whole run, by somebody who asked for nothing else.
CATCH_UP_SECONDS = 600.0


class Reporter:
    """Tells of one folder. Does nothing where the configuration asks for nothing."""

    def __init__(self, place: Place, folder: Path, say: Callable[[str], None], *, here: bool = True) -> None:
        self._place = place
        self._folder = folder
        self._say = say
        self._here = here
        self._plan: Plan | None = None
        self._child: Process | None = None
        self._wait_seconds = FIRST_WAIT_SECONDS
        self._start_at = 0.0
        self._where = ""
        self._warned = False
        # Whether the present child was told to end.
        self._ending = False
        # When the present child said that it is connected.
        self._reached_at: float | None = None

    def begin(self, run: Run) -> None:
        """The run is there, and the folder has what came of it before."""
        if self._place.on and self._plan is None:
            plan = self._place.plan(self._folder, run, here=self._here)
            self._begin(replace(plan, finish_seconds=FINISH_SECONDS))

    def _begin(self, plan: Plan) -> None:
        self._plan = plan
        self._start(plan)

    def _start(self, plan: Plan) -> None:
        try:
            self._child = Process(self._place, self._folder, plan)
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
                self._say(f"{self._place.title} is reached again")
                self._warned = False

    def _hear(self, child: Process) -> None:
        for where in child.reached():
            self._reached_at = time.monotonic()
            if where != self._where:
                self._where = where
                self._say(f"{self._place.title}: {where}")

    def _failed(self, why: str) -> None:
        if self._child is not None:
            self._child.close()
            self._child = self._reached_at = None
        self._start_at = time.monotonic() + self._wait_seconds
        self._wait_seconds = min(2 * self._wait_seconds, LONGEST_WAIT_SECONDS)
        if not self._warned:
            self._warned = True
            self._say(
                f"{self._place.title} takes nothing now: {why}; the run goes on, and it will be tried again"
            )

    def end(self, ending: Ending) -> None:
        """The run ended: say so there. `finish` waits for it, of several at once."""
        if self._plan is None:
            return
        if self._child is None or self._child.ended:
            # What kept it from its work may be over.
            self._close()
            self._start(self._plan)
        if self._child is not None:
            self._child.end(ending)
            self._ending = True

    def finish(self, ending: Ending) -> str:
        """The run ended: wait until that is told, bounded. What a person should know of it."""
        if not self._ending:
            self.end(ending)
        plan, self._plan = self._plan, None
        if plan is None:
            return ""
        if self._child is None:
            return self._lacking("its process cannot be started")
        done = self._child.finish(plan.finish_seconds)
        for where in self._child.reached():
            self._where = where  # which is said below
        why = self._child.last_words
        self._close()
        if not done:
            return self._lacking(why)
        return f"{self._place.title}: {self._place.done(plan, self._where)}"

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
            self._ending = False

    def catch_up(self, run_id: str, config_toml: str, ending: Ending) -> str:
        """Tell of a folder whose run is over. What a person should know of it."""
        if not self._place.on:
            return ""
        known = id_of_folder(run_id, self._folder, plan_file(self._place, self._folder))
        plan = self._place.plan(self._folder, Run(run_id=run_id, config_toml=config_toml), here=False)
        self._begin(replace(plan, run_id=known, finish_seconds=CATCH_UP_SECONDS))
        return self.finish(ending)

    def _lacking(self, why: str) -> str:
        return (
            f"{self._place.title} has not everything: {why}; the files have, and what is missing there comes "
            f"when the run is reported again, by {again(here=self._here)}"
        )


def again(*, here: bool) -> str:
    """What reports a folder once more; of `quartet watch`, whose run is elsewhere, nothing is resumed."""
    return f"the same command{' with --resume' if here else ''}"


@contextmanager
def reporting(
    place: Place, folder: Path, say: Callable[[str], None], *, here: bool = True
) -> Iterator[Reporter]:
    """A reporter that leaves nothing running, and says what there was also of a run that ended in a fault."""
    reporter = Reporter(place, folder, say, here=here)
    try:
        yield reporter
    finally:
        if last := reporter.finish(UNKNOWN):
            told(last, sys.stderr)
