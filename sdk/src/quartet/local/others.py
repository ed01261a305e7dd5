"""The other machines of a run, as its launcher sees them.

1. They are told what to run when the launcher starts (`begin`), and to end when it ends, however it does, but
   for SIGKILL (plan.py).
2. One that cannot run what it was told fails the run, with its own words.
3. One that did not come within LOOK_SECONDS, that somebody ended, or that nothing is heard of for
   SILENT_SECONDS, is named, with the command that it lacks; once more when it is there. The run waits for it.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from quartet.local.plan import POLL_SECONDS, Plan, Report, read_report, write_plan
from quartet.local.supervisor import ServiceFailed, Status

LOOK_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 30.0


class Others:
    """The machines of a plan, but for the first. Where the run has one machine there are none."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._machines = range(1, len(plan.machines))

    def begin(self) -> None:
        """Tell them what to run."""
        if self._machines:
            write_plan(self._folder, self._plan)

    def end(self) -> None:
        """Tell them that it ended."""
        if self._machines:
            write_plan(self._folder, self._plan.model_copy(update={"ended": True}))

    @property
    def statuses(self) -> list[Status]:
        """Of their processes, as far as they are told."""
        return [status for report in self._reports() if report for status in report.statuses]

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts by service."""
        return {status.name: status.restarts for status in self.statuses}

    async def wait_up(self) -> None:
        """Until all of their services listen."""
        while True:
            if all(report and report.state == "up" for report in self._reports()):
                return
            await asyncio.sleep(POLL_SECONDS)

    async def wait_failed(self) -> None:
        """For ever, or until one cannot go on: raises ServiceFailed."""
        while True:
            for machine, report in zip(self._machines, self._reports(), strict=True):
                if report and report.state == "failed":
                    raise ServiceFailed(f"on {self._plan.hosts.names[machine]}: {report.said}")
            await asyncio.sleep(POLL_SECONDS)

    async def name_missing(self, say: Callable[[str], None]) -> None:
        """For ever."""
        missing: set[int] = set()
        heard: dict[int, tuple[Report | None, float]] = {}
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = asyncio.get_running_loop().time()
            for machine, report in zip(self._machines, self._reports(), strict=True):
                before, since = heard.get(machine, (None, now))
                heard[machine] = report, since if report == before else now
                is_silent = now - heard[machine][1] >= SILENT_SECONDS
                is_there = report is not None and report.state != "left" and not is_silent
                host = self._plan.hosts.names[machine]
                if is_there and machine in missing:
                    missing.discard(machine)
                    say(f"{host} is there")
                elif not is_there and machine not in missing:
                    missing.add(machine)
                    command = shlex.join(["quartet", "node", str(self._folder), "--host", host])
                    say(f"waiting for {host}; start there: {command}")

    def _reports(self) -> Sequence[Report | None]:
        return [read_report(self._folder, machine, self._plan.launch) for machine in self._machines]
