"""`quartet node FOLDER`: what this machine does in a run over several, which `quartet rl --hosts` launches.

1. It waits for a launch that goes on, looks whether this machine can run what it is told, keeps its services
   alive, and ends with the launch. Of one that is launched again it runs the newest.
2. One at a time has a machine's part; a second one is refused, and changes nothing.
3. A launcher that was killed finds it again; where none shows for LOST_SECONDS it ends the services, and
   waits.
4. It works in the folder in which the run was launched: paths mean there what they mean here.
5. Exit codes: 0 the launch ended, 1 a service could not be kept alive, 2 it is refused here, 130 stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from quartet.cli import exits
from quartet.cli.asked import listening
from quartet.cli.job import RECORD
from quartet.config import ConfigError
from quartet.kit.folder import lock_file
from quartet.kit.standard_streams import say
from quartet.local.deployment import check, write
from quartet.local.devices import as_seen
from quartet.local.plan import (
    BEAT_SECONDS,
    POLL_SECONDS,
    Plan,
    Report,
    lock_of,
    read_beat,
    read_plan,
    write_report,
)
from quartet.local.ports import check_reached, is_of_this_machine
from quartet.local.supervisor import ServiceFailed, State, Supervisor
from quartet.local.wiring import VISIBLE, service_of

DRAIN_SECONDS: Final = 10.0
#: Long enough to look what happened, and to launch the run again.
LOST_SECONDS: Final = 600.0
#: A launcher that lives shows it several times in so long.
SILENT_SECONDS: Final = 3 * BEAT_SECONDS
#: A plan that is away for so long is no file that is replaced, nor a folder that is emptied for a new run.
GONE_SECONDS: Final = 60.0

DESCRIPTION = """\
Run the services of this machine, for a run over several that `quartet rl --hosts` launches on the first.

  quartet node FOLDER [--host NAME]

FOLDER is the run's output folder, on a file system that all of its machines see. Ends with the run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder, and who this is."""
    parser.add_argument("folder", type=Path, help="the output folder of the run")
    parser.add_argument(
        "--host", help="this machine's name among --hosts (default: whichever is its name or address)"
    )


def run(options: argparse.Namespace) -> int:
    """The command."""
    return asyncio.run(_serve(options.folder.absolute(), options.host))


async def _serve(folder: Path, host: str | None) -> int:
    """Launch after launch, until one ends or somebody asks for the end."""
    asked = asyncio.Event()

    def ask() -> None:
        if not asked.is_set():
            say("stopping", sys.stderr)
        asked.set()

    with listening(ask, ask), ExitStack() as opened:
        plan = await _launch(folder, asked)
        while plan is not None and not plan.ended:
            launch, machine = plan.launch, _machine(plan, host)
            opened.close()  # also of the same machine: --overwrite moved its lock away
            opened.enter_context(_taken(folder, machine, plan.hosts.names[machine]))
            try:
                plan = await _carry_out(folder, plan, machine, asked) or await _launch(folder, asked)
            except (ConfigError, ServiceFailed) as error:
                with contextlib.suppress(OSError):  # the error itself is told here
                    write_report(folder, machine, Report(launch=launch, state="failed", said=str(error)))
                raise
        if plan is None:
            return exits.INTERRUPTED
        say("the launch ended; where the run goes on, start this again", sys.stdout)
        return exits.DONE


async def _launch(folder: Path, asked: asyncio.Event) -> Plan | None:
    """One that goes on, by a sign of its launcher that is new; None where somebody asked for the end."""
    before, said = (read_plan(folder), read_beat(folder)), ""
    began = time.monotonic()
    while not asked.is_set():
        plan, beat = read_plan(folder), read_beat(folder)
        if plan is not None and not plan.ended and (plan, beat) != before:
            return plan
        is_silent = time.monotonic() - began > SILENT_SECONDS
        if (why := _why_none(folder, plan, is_silent=is_silent)) != said:
            say(f"waiting for a launch of the run in {folder}{why}", sys.stdout)
            said = why
        await asyncio.sleep(POLL_SECONDS)
    return None


def _why_none(folder: Path, plan: Plan | None, *, is_silent: bool) -> str:
    """What there is instead of one, for whoever named another folder than he meant."""
    if plan is not None and not plan.ended:
        return (
            " (the last one shows no sign of life)"
            if is_silent
            else " (looking whether the last one goes on)"
        )
    if plan is not None:
        return " (the last one ended)"
    if not folder.is_dir():
        return " (there is no such folder here yet)"
    return " (the one there is of a single machine)" if (folder / RECORD).exists() else " (there is none yet)"


async def _carry_out(folder: Path, plan: Plan, machine: int, asked: asyncio.Event) -> Plan | None:
    """Run it until it ends, which is the plan that says so, or another one that takes its place; None where
    somebody asks for the end, or the launcher is lost. Raises ConfigError, ServiceFailed."""
    _enter(plan.folder)
    check_reached(plan.hosts.names, machine)
    visible = os.environ.get(VISIBLE)
    tables = {
        name: {**table, "gpus": as_seen(table["gpus"], visible)} if "gpus" in table else table
        for name, table in plan.machines[machine].items()
    }
    specs = write(tables, folder, plan.hosts, machine)
    await check(specs)
    supervisor = Supervisor(specs)
    say(f"{plan.hosts.names[machine]} runs {', '.join(tables)}", sys.stdout)
    has_ranks = any(service_of(name) == "trainer" for name in tables)
    failed = asyncio.create_task(supervisor.wait_failed())
    reporting = _Reporting(folder, plan, machine, supervisor)
    try:
        seen = heard = time.monotonic()
        beat, is_started = read_beat(folder), False
        while not asked.is_set():
            newest, last = read_plan(folder), read_beat(folder)
            if last != beat:
                beat, heard = last, time.monotonic()
            elif time.monotonic() - heard > LOST_SECONDS:
                say(f"nothing was heard of the launcher for {LOST_SECONDS:.0f} s", sys.stderr)
                return None
            if not is_started and (not has_ranks or (last and last.launch == plan.launch and last.goes)):
                supervisor.start()
                is_started = True
            if newest is not None:
                seen = time.monotonic()
                if newest.launch != plan.launch or newest.ended:
                    return newest
            elif time.monotonic() - seen > GONE_SECONDS:
                raise ConfigError(f"{folder} has no run any more; start this again once it is launched again")
            reporting.tell()
            await asyncio.wait({failed}, timeout=POLL_SECONDS)
            if failed.done():
                failed.result()
        return None
    finally:
        failed.cancel()
        await asyncio.gather(failed, return_exceptions=True)
        await supervisor.stop(DRAIN_SECONDS)
        if asked.is_set() or time.monotonic() - heard > LOST_SECONDS:
            reporting.tell(left=True)


class _Reporting:
    """Tells the first machine how this one stands, when that changes, and every BEAT_SECONDS."""

    def __init__(self, folder: Path, plan: Plan, machine: int, supervisor: Supervisor) -> None:
        self._folder, self._plan, self._machine = folder, plan, machine
        self._supervisor = supervisor
        self._begun = time.monotonic()
        self._was_up = False
        self._told: Report | None = None
        self._is_away = False

    def tell(self, *, left: bool = False) -> None:
        """Do it, if there is something to tell. Where the folder is away for the moment it is said here."""
        statuses = self._supervisor.statuses
        self._was_up = self._was_up or all(status.state is State.UP for status in statuses)
        report = Report(
            launch=self._plan.launch,
            state="left" if left else "up" if self._was_up else "starting",
            beat=int((time.monotonic() - self._begun) / BEAT_SECONDS),
            statuses=tuple(statuses),
        ).model_copy(deep=True)  # the supervisor's own change with time
        if report == self._told:
            return
        try:
            write_report(self._folder, self._machine, report)
        except OSError as error:
            if not self._is_away:
                say(f"{self._folder} takes no files ({error.strerror}); the run goes on", sys.stderr)
            self._is_away = True
            return
        self._told, self._is_away = report, False


def _taken(folder: Path, machine: int, name: str) -> contextlib.AbstractContextManager[object]:
    """A machine's part. Raises ConfigError where another process has it."""
    file = lock_of(folder, machine)
    try:
        return lock_file(file)
    except BlockingIOError:
        raise ConfigError(
            f"another 'quartet node' does the part of {name} in {folder} already; end that one first"
        ) from None


def _enter(launched_in: str) -> None:
    try:
        os.chdir(launched_in)
    except OSError as error:
        raise ConfigError(
            f"the run was launched in {launched_in}, which is not here ({error.strerror}); its machines have "
            "to see that folder, too"
        ) from error


def _machine(plan: Plan, host: str | None) -> int:
    """Which of the machines this is. Raises ConfigError."""
    names = plan.hosts.names
    if host is None:
        mine = _own_names().intersection(names) or set(filter(is_of_this_machine, names))
    else:
        mine = {host}
    found = [number for number, name in enumerate(names) if name in mine]
    if not found:
        is_called = "this machine is none of" if host is None else f"--host {host} is none of"
        raise ConfigError(f"{is_called} {', '.join(names)}; say which with --host")
    if found[0] == 0:
        raise ConfigError(f"{names[0]} is the first machine, where 'quartet rl' runs; start this on others")
    return found[0]


def _own_names() -> set[str]:
    """What this machine is called, and the addresses of that; not always one by which others reach it."""
    names = {socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0]}
    for name in list(names):
        with contextlib.suppress(OSError):
            names |= {str(address[0]) for *_, address in socket.getaddrinfo(name, None)}
    return names
