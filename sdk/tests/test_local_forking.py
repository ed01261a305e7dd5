"""Services as forks of one process: as their commands would be, with imports that were made once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from quartet.local import forking
from quartet.local.child import Child, ChildSpec, child_environment
from quartet.local.forking import ForkServer
from quartet.local.supervisor import State, Supervisor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks of a launcher are for Linux")

#: What services share: it says so when it is imported, in the log of whoever asked first.
SHARED = """
import os
print("imported by", os.getpid(), flush=True)
importer = os.getpid()
# As libraries do, and the first of what a launcher sets.
os.environ["OMP_NUM_THREADS"] = "3"
"""
SERVICE = """
import json, os, sys, threading, time
port_file, mode = sys.argv[1], sys.argv[2]
if mode == "words": sys.exit("error: no model there")
if mode == "raising": raise ValueError("nothing to serve")
if mode == "leaving": threading.Thread(target=time.sleep, args=(60,)).start(); sys.exit(3)
import shared
said = {"pid": os.getpid(), "group": os.getpgid(0), "importer": shared.importer, "parent": os.getppid(),
        "name": __name__, "file": sys.argv[0], "more": os.environ.get("MORE"), "input": sys.stdin.read(),
        "open": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                       if os.path.exists(f"/proc/self/fd/{fd}"))}
print("served", flush=True)
with open(port_file + ".part", "w") as file: json.dump(said, file)
os.rename(port_file + ".part", port_file)
time.sleep(60)
"""
SECONDS = 10.0


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "shared.py").write_text(SHARED)
    (folder / "served.py").write_text(SERVICE)
    (folder / "slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
async def forks(modules: Path) -> AsyncIterator[ForkServer]:
    server = ForkServer(child_environment())
    yield server
    await server.close()


def spec(
    folder: Path, name: str = "server", mode: str = "plain", preload: str = "shared", **environment: str
) -> ChildSpec:
    port_file = folder / f"{name}.port"
    command = [sys.executable, "-m", "served", str(port_file), mode]
    return ChildSpec(name, command, "127.0.0.1:1", folder / f"{name}.log", port_file, environment, preload)


def said(one: ChildSpec) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(one.port_file.read_text())
    return found


def alive(pid: int) -> bool:
    """Running, and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - what is awaited happens in another process
            await asyncio.sleep(0.02)


async def test_a_forked_service_is_as_its_command_would_be(forks: ForkServer, tmp_path: Path) -> None:
    one = spec(tmp_path, MORE="of it")
    child = await Child.start(one, forks)
    assert await child.wait_bound(SECONDS)
    told = said(one)
    assert told["pid"] == told["group"] == child.pid
    assert (told["name"], Path(told["file"]).name) == ("__main__", "served.py")
    assert (told["more"], told["input"]) == ("of it", "")
    # Nothing of the launcher or of the server: what it holds is its own.
    assert told["open"] == ["/dev/null", str(one.log_file), str(one.log_file)]
    process = Path(f"/proc/{child.pid}")
    assert (process / "cmdline").read_bytes().rstrip(b"\0").decode() == " ".join(one.command)
    assert (process / "comm").read_text().strip() == Path(sys.executable).name[:15]
    assert "served" in one.log_file.read_text()


async def test_what_they_share_is_imported_once(forks: ForkServer, tmp_path: Path) -> None:
    first, second = spec(tmp_path, "first"), spec(tmp_path, "second")
    children = [await Child.start(one, forks) for one in (first, second)]
    for child in children:
        assert await child.wait_bound(SECONDS)
    server = said(first)["importer"]
    assert {said(one)[key] for one in (first, second) for key in ("importer", "parent")} == {server}
    assert first.log_file.read_text().count("imported by") == 1
    assert "imported by" not in second.log_file.read_text()


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("words", 1, "error: no model there"),
        ("raising", 1, "ValueError: nothing to serve"),
        # A thread of its own does not keep it.
        ("leaving", 3, ""),
    ],
)
async def test_a_service_that_ends_says_with_what(
    forks: ForkServer, tmp_path: Path, mode: str, code: int, words: str
) -> None:
    child = await Child.start(spec(tmp_path, mode=mode), forks)
    assert not await child.wait_bound(SECONDS)
    assert await asyncio.wait_for(child.wait(), SECONDS) == code
    assert words in child.last_words()


async def test_stopping_and_killing_are_told_by_their_signals(forks: ForkServer, tmp_path: Path) -> None:
    stopped, killed = [await Child.start(spec(tmp_path, name), forks) for name in ("stopped", "killed")]
    assert await stopped.wait_bound(SECONDS) and await killed.wait_bound(SECONDS)
    assert await stopped.stop(SECONDS) == -signal.SIGTERM
    assert await killed.kill() == -signal.SIGKILL
    assert await stopped.stop(SECONDS) == -signal.SIGTERM, "of one that has ended, as before"


async def test_what_cannot_be_imported_is_said_by_the_service(forks: ForkServer, tmp_path: Path) -> None:
    one = spec(tmp_path, preload="not_there")
    child = await Child.start(one, forks)
    # The service needs less than its preload, and runs.
    assert await child.wait_bound(SECONDS)
    (tmp_path / "modules/shared.py").write_text("raise OSError('no such library')")
    broken = await Child.start(spec(tmp_path, "broken"), forks)
    # It was imported by the first service, in its own process; the server has not tried before.
    assert await asyncio.wait_for(broken.wait(), SECONDS) == 1
    assert "OSError: no such library" in broken.last_words()


async def test_a_fork_server_that_is_killed_takes_its_children_along_and_all_are_started_again(
    modules: Path, tmp_path: Path
) -> None:
    first, second = spec(tmp_path, "first"), spec(tmp_path, "second")
    supervisor = Supervisor([first, second])
    supervisor.start()
    try:
        await supervisor.wait_bound()
        server, before = said(first)["parent"], [status.pid for status in supervisor.statuses]
        os.kill(server, signal.SIGKILL)
        await until(lambda: [s.restarts for s in supervisor.statuses] == [1, 1])
        await until(lambda: {s.state for s in supervisor.statuses} == {State.UP})
        assert not any(alive(pid) for pid in before if pid is not None)
        assert said(first)["parent"] == said(second)["parent"] != server
    finally:
        await supervisor.stop(1.0)
    assert not alive(said(first)["parent"])


async def test_a_service_is_not_started_where_the_server_cannot(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "COMMAND", [sys.executable, "-c", "raise SystemExit('no memory')"])
    forks = ForkServer(child_environment())
    child = await Child.start(spec(tmp_path), forks)
    assert await asyncio.wait_for(child.wait(), SECONDS) == 1
    assert "no memory" in child.last_words()
    await forks.close()


async def test_stopping_does_not_wait_for_a_long_import(modules: Path, tmp_path: Path) -> None:
    supervisor = Supervisor([spec(tmp_path, preload="slow")])
    supervisor.start()
    await asyncio.sleep(0.5)
    started = time.monotonic()
    await asyncio.wait_for(supervisor.stop(SECONDS), SECONDS)
    assert time.monotonic() - started < SECONDS / 2


async def test_a_child_that_nobody_waits_for_is_killed(forks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "modules/slow.py").write_text("import time; time.sleep(1)")
    waiting = asyncio.create_task(Child.start(spec(tmp_path, "given up", preload="slow"), forks))
    await asyncio.sleep(0.3)
    waiting.cancel()
    kept = await Child.start(spec(tmp_path, "kept"), forks)
    assert await kept.wait_bound(SECONDS)
    server = said(spec(tmp_path, "kept"))["parent"]
    left = Path(f"/proc/{server}/task/{server}/children")
    await until(lambda: left.read_text().split() == [str(kept.pid)])
