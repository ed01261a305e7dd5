"""`quartet node FOLDER`: what this machine does in a run over several, which `quartet rl --hosts` launches.

1. It waits for the launch, looks whether this machine can run what it is told, keeps its services alive, and
   ends with the launch. Of one that is launched again it runs the newest.
2. Exit codes: 0 the launch ended, 1 a service could not be kept alive, 2 it is refused here, 130 stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quartet.cli import exits
from quartet.config import ConfigError
from quartet.kit.standard_streams import say
from quartet.local.deployment import check, write
from quartet.local.devices import as_seen
from quartet.local.plan import BEAT_SECONDS, POLL_SECONDS, Plan, Report, read_plan, write_report
from quartet.local.supervisor import ServiceFailed, State, Supervisor
from quartet.local.wiring import VISIBLE, check_reached

DRAIN_SECONDS: Final = 10.0

DESCRIPTION = """\
Run the services of this machine, for a run over several that `quartet rl --hosts` launches on the first.

  quartet node FOLDER [--host NAME]

FOLDER is the run's output folder, on a file system that all of its machines see. Ends with the run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder, and who this is."""
    parser.add_argument("folder", type=Path, help="the output folder of the run")
    parser.add_argument(
        "--host", help="this machine's name among --hosts (default: its own names and addresses)"
    )


def run(options: argparse.Namespace) -> int:
    """The command."""
    return asyncio.run(_serve(options.folder.absolute(), options.host))


async def _serve(folder: Path, host: str | None) -> int:
    """Launch after launch, until one ends or somebody asks for the end."""
    asked = asyncio.Event()
    with _asked_by_signals(asked):
        plan = await _launch(folder, asked)
        while plan is not None:
            machine = _machine(plan, host)
            try:
                await _carry_out(folder, plan, machine, asked)
            except (ConfigError, ServiceFailed) as error:
                write_report(folder, machine, Report(launch=plan.launch, state="failed", said=str(error)))
                raise
            if asked.is_set():
                write_report(folder, machine, Report(launch=plan.launch, state="left"))
                return exits.INTERRUPTED
            newest = read_plan(folder)
            if newest is None or newest.ended:
                print("the run ended")
                return exits.DONE
            plan = newest
    return exits.INTERRUPTED


async def _launch(folder: Path, asked: asyncio.Event) -> Plan | None:
    """A launch that goes on; None where somebody asked for the end meanwhile."""
    said = False
    while not asked.is_set():
        plan = read_plan(folder)
        if plan is not None and not plan.ended:
            return plan
        if not said:
            print(f"waiting for a launch of the run in {folder}", flush=True)
            said = True
        await asyncio.sleep(POLL_SECONDS)
    return None


async def _carry_out(folder: Path, plan: Plan, machine: int, asked: asyncio.Event) -> None:
    """Run it until it ends or somebody asks for the end. Raises ConfigError, ServiceFailed."""
    check_reached(plan.hosts.names, machine)
    visible = os.environ.get(VISIBLE)
    tables = {
        name: {**table, "gpus": as_seen(table["gpus"], visible)} if "gpus" in table else table
        for name, table in plan.machines[machine].items()
    }
    specs = write(tables, folder, plan.hosts, machine)
    await check(specs)
    supervisor = Supervisor(specs)
    print(f"{plan.hosts.names[machine]} runs {', '.join(tables)}", flush=True)
    supervisor.start()
    failed = asyncio.create_task(supervisor.wait_failed())
    told: Report | None = None
    begun = time.monotonic()
    try:
        while not asked.is_set() and _goes_on(folder, plan):
            up = all(status.state is State.UP for status in supervisor.statuses)
            report = Report(
                launch=plan.launch,
                state="up" if up or (told and told.state == "up") else "starting",
                beat=int((time.monotonic() - begun) / BEAT_SECONDS),
                statuses=tuple(supervisor.statuses),
            ).model_copy(deep=True)
            if report != told:
                write_report(folder, machine, report)
                told = report
            await asyncio.wait({failed}, timeout=POLL_SECONDS)
            if failed.done():
                failed.result()
    finally:
        failed.cancel()
        await asyncio.gather(failed, return_exceptions=True)
        await supervisor.stop(DRAIN_SECONDS)


def _goes_on(folder: Path, plan: Plan) -> bool:
    newest = read_plan(folder)
    # None: a folder that is emptied for a new run, or a network's file system that is away for a moment.
    return newest is None or (newest.launch == plan.launch and not newest.ended)


def _machine(plan: Plan, host: str | None) -> int:
    """Which of the machines this is. Raises ConfigError."""
    names = plan.hosts.names
    mine = _own_names() if host is None else {host}
    found = [number for number, name in enumerate(names) if name in mine]
    if not found:
        is_called = "this machine is none of" if host is None else f"--host {host} is none of"
        raise ConfigError(f"{is_called} {', '.join(names)}; say which with --host")
    if found[0] == 0:
        raise ConfigError(
            f"{names[0]} is the first machine, where 'quartet rl' runs; start this on the others"
        )
    return found[0]


def _own_names() -> set[str]:
    """Names and addresses of this machine."""
    names = {socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0]}
    for name in list(names):
        with contextlib.suppress(OSError):
            names |= {str(address[0]) for *_, address in socket.getaddrinfo(name, None)}
    return names


@contextlib.contextmanager
def _asked_by_signals(asked: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def ask() -> None:
        if not asked.is_set():
            say("stopping the services", sys.stderr)
        asked.set()

    for number in heard:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
