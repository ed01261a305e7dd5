"""The supervisor with real children: small ones that can be killed, do not start, or ignore SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from processes import SECONDS, alive, until
from quartet.local import child
from quartet.local import supervisor as supervision
from quartet.local.child import ChildSpec
from quartet.local.supervisor import ServiceFailed, State, Supervisor, next_delay
from quartet.local.tether import tethered

# Writes its port file, then sleeps. "stubborn" ignores SIGTERM, "worker" leaves a child in its group, "slow"
# listens in its first life and in the others dies after loading.
SERVER = """
import os, signal, subprocess, sys, time
port_file, mode = sys.argv[1], sys.argv[2]
if mode == "stubborn": signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "worker":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(port_file + ".worker", "w").write(str(child.pid))
if mode == "slow" and os.path.exists(port_file + ".before"):
    time.sleep(0.3)
    sys.exit("the port is in use")
if mode == "slow":
    for file in (port_file + ".before", port_file): open(file, "w").close()
    sys.exit(1)
if mode == "restless":
    if os.path.exists(port_file + ".before"): print("error: the state is of another release", flush=True)
    open(port_file + ".before", "a").close()
    open(port_file, "w").close()
    sys.exit(1)
if mode == "broken": sys.exit("no model there")
if mode == "refusing":
    print("error: ranks = 3 is refused", flush=True)
    sys.exit("what else there is to say " * 500 + "\\n" + "the end" * 585)
print("started", os.getpid(), flush=True)
open(port_file, "w").write("127.0.0.1:1\\n")
time.sleep(60)
"""


def spec(folder: Path, mode: str = "plain", name: str = "server") -> ChildSpec:
    port_file = folder / f"{name}.port"
    command = [sys.executable, "-c", SERVER, str(port_file), mode]
    return ChildSpec(name, command, "127.0.0.1:1", folder / f"{name}.log", port_file)


async def test_a_killed_service_is_started_again(tmp_path: Path) -> None:
    supervisor = Supervisor([spec(tmp_path)])
    supervisor.start()
    try:
        await supervisor.wait_bound()
        status = supervisor.statuses[0]
        first = status.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: status.restarts == 1 and status.state is State.UP)
        assert status.pid != first
    finally:
        await supervisor.stop(1.0)
    assert (tmp_path / "server.log").read_text().count("started") == 2, "one log over both lives"
    assert not alive(status.pid or 0)


async def test_a_service_that_never_binds_fails_with_its_log(tmp_path: Path) -> None:
    supervisor = Supervisor([spec(tmp_path), spec(tmp_path, "broken", "broken")])
    supervisor.start()
    try:
        with pytest.raises(ServiceFailed, match=r"(?s)broken did not start \(exit code 1\).*no model there"):
            await supervisor.wait_bound()
    finally:
        await supervisor.stop(1.0)
    assert supervisor.restarts == {"server": 0, "broken": 0}


async def test_what_a_service_refused_is_said_before_the_end_of_its_log(tmp_path: Path) -> None:
    refusing = spec(tmp_path, "refusing")
    # Of a life before.
    refusing.log_file.write_text("error: something else\n")
    supervisor = Supervisor([refusing])
    supervisor.start()
    try:
        with pytest.raises(
            ServiceFailed, match=r"exit code 1\); from \S+:\nerror: ranks = 3 is refused\nthe end"
        ):
            await supervisor.wait_bound()
    finally:
        await supervisor.stop(1.0)


async def test_why_a_service_died_is_known_where_it_refused_something_in_that_life(tmp_path: Path) -> None:
    restless = spec(tmp_path, "restless")
    restless.log_file.write_text("error: something else\n")
    supervisor = Supervisor([restless])
    status = supervisor.statuses[0]
    supervisor.start()
    try:
        await until(lambda: status.restarts == 1)
        assert status.why == "", "neither the life before, nor a full disk"
        await until(lambda: status.restarts == 2)
        assert status.why == "the state is of another release"
    finally:
        await supervisor.stop(1.0)


async def test_a_service_whose_log_has_no_room_died_of_that_as_far_as_anybody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "is_full", lambda folder: folder == tmp_path)
    monkeypatch.setattr(supervision, "MAX_RESTARTS_IN_A_ROW", 1)
    supervisor = Supervisor([spec(tmp_path)])
    status, failed = supervisor.statuses[0], asyncio.create_task(supervisor.wait_failed())
    supervisor.start()
    try:
        full = f"the disk of its log {tmp_path / 'server.log'} is full"
        for life in range(2):
            await until(lambda life=life: status.restarts == life and status.state is State.UP)
            assert status.why == (full if life else "")
            os.kill(status.pid or 0, signal.SIGKILL)
        with pytest.raises(ServiceFailed, match=rf"(?s)died 1 times in a row.*:\nstarted.*\n{full}$"):
            await asyncio.wait_for(failed, SECONDS)
    finally:
        failed.cancel()
        await supervisor.stop(1.0)


async def test_dying_in_a_row_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "MAX_RESTARTS_IN_A_ROW", 2)
    supervisor = Supervisor([spec(tmp_path)])
    supervisor.start()
    status = supervisor.statuses[0]
    failed = asyncio.create_task(supervisor.wait_failed())
    try:
        for life in range(3):
            await until(lambda life=life: status.restarts == life and status.state is State.UP)
            os.kill(status.pid or 0, signal.SIGKILL)
        with pytest.raises(ServiceFailed, match="died 2 times in a row"):
            await asyncio.wait_for(failed, SECONDS)
    finally:
        failed.cancel()
        await supervisor.stop(1.0)
    assert status.state is State.FAILED


async def test_what_dies_at_every_restart_is_given_up_however_long_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "MAX_RESTARTS_IN_A_ROW", 2)
    monkeypatch.setattr(supervision, "STABLE_SECONDS", 0.2)
    supervisor = Supervisor([spec(tmp_path, "slow")])
    supervisor.start()
    try:
        with pytest.raises(ServiceFailed, match=r"(?s)died 2 times in a row.*the port is in use"):
            await asyncio.wait_for(supervisor.wait_failed(), SECONDS)
    finally:
        await supervisor.kill()


async def test_a_machine_that_can_start_nothing_for_a_moment_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor([spec(tmp_path)])
    supervisor.start()
    status = supervisor.statuses[0]
    try:
        await supervisor.wait_bound()
        start, refusals = asyncio.create_subprocess_exec, [1, 2]

        async def refusing(*command: Any, **options: Any) -> Any:
            if refusals:
                refusals.pop()
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return await start(*command, **options)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", refusing)
        os.kill(status.pid or 0, signal.SIGKILL)
        await until(lambda: status.why == "it cannot be started: Resource temporarily unavailable")
        await until(lambda: status.restarts == 3 and status.state is State.UP)

        refusals.extend(range(supervision.MAX_RESTARTS_IN_A_ROW + 1))
        monkeypatch.setattr(supervision, "MAX_DELAY_SECONDS", 0.01)
        os.kill(status.pid or 0, signal.SIGKILL)
        with pytest.raises(ServiceFailed, match=r"died 10 times in a row .*\nit cannot be started: Resource"):
            await asyncio.wait_for(supervisor.wait_failed(), SECONDS)
    finally:
        await supervisor.stop(1.0)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", AsyncMock(side_effect=PermissionError(13, "No")))
    never = Supervisor([spec(tmp_path)])
    never.start()
    with pytest.raises(PermissionError):
        await asyncio.wait_for(never.wait_bound(), SECONDS)
    await never.stop(1.0)


async def test_stop_is_bounded_and_ends_what_a_service_started(tmp_path: Path) -> None:
    supervisor = Supervisor([spec(tmp_path, "stubborn", "stubborn"), spec(tmp_path, "worker", "worker")])
    supervisor.start()
    await supervisor.wait_bound()
    worker = int((tmp_path / "worker.port.worker").read_text())
    assert alive(worker)
    started = time.monotonic()
    await supervisor.stop(0.3)
    assert time.monotonic() - started < SECONDS  # of the minute that they sleep
    await until(lambda: not alive(worker))
    assert [status.state for status in supervisor.statuses] == [State.STOPPED, State.STOPPED]


def test_children_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = f"""
import asyncio, sys
from pathlib import Path
from quartet.local.child import ChildSpec
from quartet.local.supervisor import Supervisor
async def main():
    folder = Path({str(tmp_path)!r})
    command = [sys.executable, "-c", {SERVER!r}, str(folder / "s.port"), "stubborn"]
    supervisor = Supervisor([ChildSpec("s", command, "127.0.0.1:1", folder / "s.log", folder / "s.port")])
    supervisor.start()
    await supervisor.wait_bound()
    print(supervisor.statuses[0].pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.kill()
        process.wait()
        deadline = time.monotonic() + SECONDS
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(pid)
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)


def test_delays_grow_to_their_bound() -> None:
    delays = [next_delay(deaths) for deaths in range(1, 40)]
    assert delays == sorted(delays)
    assert delays[0] == supervision.FIRST_DELAY_SECONDS
    assert delays[-1] == supervision.MAX_DELAY_SECONDS


@pytest.mark.parametrize("gone", [True, False])
def test_what_is_started_in_a_folder_that_is_gone_runs_in_the_root(
    gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tether.py 3: a run that goes on while its checkout is removed restarts its services."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    if gone:
        (tmp_path / "here").rmdir()
    command = tethered([sys.executable, "-c", "import os; print(os.getcwd())"])
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    monkeypatch.chdir(tmp_path)  # what is undone at the end is somewhere
    assert said.stdout.strip() == ("/" if gone else str(tmp_path / "here"))
