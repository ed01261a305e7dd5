"""The other machines of a run, as its launcher sees them.

1. They are told what to run (`begin`), and to end when the launcher ends (`end`), however it does, but for
   SIGKILL (plan.py).
2. One that cannot run what it was told fails the run, with its own words.
3. One that did not come within LOOK_SECONDS, that somebody ended, or that nothing is heard of for
   SILENT_SECONDS, is named every AGAIN_SECONDS, with the command that it lacks; and when it is there.
4. Their folder is looked at in a thread: a network's file system that hangs holds nothing up.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from quartet.local.plan import (
    BEAT_SECONDS,
    POLL_SECONDS,
    Beat,
    Plan,
    Report,
    read_plan,
    read_report,
    write_beat,
    write_plan,
)
from quartet.local.supervisor import ServiceFailed, Status

LOOK_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 30.0
AGAIN_SECONDS: Final = 60.0


class Others:
    """The machines of a plan, but for the first. Where the run has one machine there are none."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._machines = range(1, len(plan.hosts.names))
        #: The last that was heard of each.
        self._reports: Sequence[Report | None] = [None for _ in self._machines]
        self._begun = time.monotonic()
        self._goes = False
        self._shown: Beat | None = None
        # Of a machine that came back, which counts from the beginning.
        self._restarts_before: Counter[str] = Counter()

    def begin(self) -> None:
        """Tell them what to run. Errors: OSError."""
        if self._machines:
            write_plan(self._folder, self._plan)
        elif (before := read_plan(self._folder)) is not None and not before.ended:
            # Of a launch over several that was killed, and goes on here alone.
            write_plan(self._folder, before.model_copy(update={"ended": True}))

    def end(self) -> str:
        """Tell them that it ended. Why they could not be told, if so."""
        try:
            if self._machines:
                write_plan(self._folder, self._plan.model_copy(update={"ended": True}))
        except OSError as error:
            names = ", ".join(self._plan.hosts.names[1:])
            return f"{names} could not be told of the end ({error.strerror}); end 'quartet node' there"
        return ""

    @property
    def statuses(self) -> list[Status]:
        """Of their processes, as far as they are told."""
        return [status for report in self._reports if report for status in report.statuses]

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts by service."""
        return {status.name: status.restarts + self._restarts_before[status.name] for status in self.statuses}

    async def wait_there(self) -> None:
        """Until each has begun its part. Ranks begin then: they look for each other ever more rarely, and for
        minutes at the most."""
        await self._wait_for(("starting", "up"))
        self._goes = True

    async def wait_up(self) -> None:
        """Until all of their services listen."""
        await self._wait_for(("up",))

    async def _wait_for(self, states: Sequence[str]) -> None:
        while True:
            if all(report and report.state in states for report in self._reports):
                return
            await asyncio.sleep(POLL_SECONDS)

    async def wait_failed(self) -> None:
        """Listen to them for ever, or until one cannot go on: raises ServiceFailed."""
        while True:
            heard = await asyncio.to_thread(self._exchange)
            for before, now in zip(self._reports, heard, strict=True):
                if before and now:
                    self._note_restarts(before, now)
            # What is away for a moment was there before.
            self._reports = [now or before for before, now in zip(self._reports, heard, strict=True)]
            for machine, report in zip(self._machines, self._reports, strict=True):
                if report and report.state == "failed":
                    raise ServiceFailed(f"on {self._plan.hosts.names[machine]}: {report.said}")
            await asyncio.sleep(POLL_SECONDS)

    async def name_missing(self, say: Callable[[str], None]) -> None:
        """For ever."""
        named: dict[int, float] = {}
        heard: dict[int, tuple[Report | None, float]] = {}
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = asyncio.get_running_loop().time()
            for machine, report in zip(self._machines, self._reports, strict=True):
                before, since = heard.get(machine, (None, now))
                heard[machine] = report, since if report == before else now
                is_silent = now - heard[machine][1] >= SILENT_SECONDS
                is_there = report is not None and report.state != "left" and not is_silent
                host = self._plan.hosts.names[machine]
                if is_there and machine in named:
                    del named[machine]
                    say(f"{host} is there")
                elif not is_there and now - named.get(machine, -math.inf) >= AGAIN_SECONDS:
                    named[machine] = now
                    command = shlex.join(["quartet", "node", str(self._folder), "--host", host])
                    say(f"waiting for {host}; start there: {command}")

    def _exchange(self) -> list[Report | None]:
        """What they say; and they are told that this one lives."""
        number = int((time.monotonic() - self._begun) / BEAT_SECONDS)
        beat = Beat(launch=self._plan.launch, beat=number, goes=self._goes)
        if self._machines and beat != self._shown:
            with contextlib.suppress(OSError):  # a full disk is told by whoever writes results
                write_beat(self._folder, beat)
                self._shown = beat
        return [read_report(self._folder, machine, self._plan.launch) for machine in self._machines]

    def _note_restarts(self, before: Report, now: Report) -> None:
        counted = {status.name: status.restarts for status in now.statuses}
        for status in before.statuses:
            if counted.get(status.name, 0) < status.restarts:
                self._restarts_before[status.name] += status.restarts
