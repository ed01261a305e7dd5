"""Services as forks of one process: as their commands would be, with imports that were made once."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from processes import SECONDS, alive, until
from quartet.local import fork_client
from quartet.local.child import Child, ChildSpec, child_environment
from quartet.local.fork_client import LOG_BYTES, ForkServer
from quartet.local.forkserver import POOLS, Request
from quartet.local.supervisor import State, Supervisor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks of a launcher are for Linux")

#: What services share: it says so when it is imported.
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
        "name": __name__, "file": sys.argv[0],
        "more": os.environ.get("MORE"), "threads": os.environ["OMP_NUM_THREADS"], "input": sys.stdin.read(),
        "open": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                       if os.path.exists(f"/proc/self/fd/{fd}"))}
print("served", flush=True)
with open(port_file + ".part", "w") as file: json.dump(said, file)
os.rename(port_file + ".part", port_file)
time.sleep(60)
"""


#: Another system, as far as names go that Linux alone has.
ELSEWHERE = """
import fcntl, os, signal
for name in [name for name in dir(fcntl) if "SEAL" in name]: delattr(fcntl, name)
del os.pidfd_open, os.memfd_create, signal.pidfd_send_signal
import quartet.cli.rl, quartet.weights.fetch
from quartet.local.fork_client import possible
assert not possible()
"""


def test_where_there_is_no_linux_services_start_as_their_commands_and_clients_work() -> None:
    subprocess.run([sys.executable, "-c", ELSEWHERE], check=True, timeout=SECONDS)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "shared.py").write_text(SHARED)
    (folder / "served.py").write_text(SERVICE)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
async def forks(modules: Path) -> AsyncIterator[ForkServer]:
    server = ForkServer(["shared"], child_environment())
    yield server
    await server.close()


def spec(folder: Path, name: str = "server", mode: str = "plain", **environment: str) -> ChildSpec:
    port_file = folder / f"{name}.port"
    command = [sys.executable, "-m", "served", str(port_file), mode]
    return ChildSpec(name, command, "127.0.0.1:1", folder / f"{name}.log", port_file, environment, "shared")


def said(one: ChildSpec) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(one.port_file.read_text())
    return found


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
    server = process.parent / str(told["parent"]) / "cmdline"
    # Without the names of what it imports: who looks for a service finds the service.
    assert server.read_bytes().rstrip(b"\0").decode() == f"{sys.executable} -m quartet.local.forkserver"
    assert "served" in one.log_file.read_text()


async def test_what_they_share_is_imported_once(forks: ForkServer, tmp_path: Path) -> None:
    first, second = spec(tmp_path, "first"), spec(tmp_path, "second")
    children = [await Child.start(one, forks) for one in (first, second)]
    for child in children:
        assert await child.wait_bound(SECONDS)
    server = said(first)["importer"]
    assert {said(one)[key] for one in (first, second) for key in ("importer", "parent")} == {server}
    assert [one.log_file.read_text() for one in (first, second)] == ["served\n"] * 2, "by none of them"
    assert (tmp_path / "forkserver.log").read_text() == f"imported by {server}\n"


@pytest.mark.parametrize(("printed", "kept"), [(0, None), (3 << 20, LOG_BYTES)])
async def test_what_imports_print_is_bounded(
    modules: Path, tmp_path: Path, printed: int, kept: int | None
) -> None:
    """fork_client.py 4: also over several servers."""
    for _ in range(2):
        (modules / "shared.py").write_text(
            f"import os\nimporter = os.getpid()\nos.write(2, bytes({printed}))"
        )
        forks = ForkServer(["shared"], child_environment())
        child = await Child.start(spec(tmp_path), forks)
        assert await child.wait_bound(SECONDS)
        await forks.close()
    log = tmp_path / "forkserver.log"
    assert (log.stat().st_size if log.exists() else None) == kept


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


async def test_what_cannot_be_imported_is_said_by_the_service(modules: Path, tmp_path: Path) -> None:
    (modules / "shared.py").write_text("raise SystemExit('no such library')")
    forks = ForkServer(["not_there", "shared"], child_environment())
    child = await Child.start(spec(tmp_path), forks)
    assert await asyncio.wait_for(child.wait(), SECONDS) == 1
    assert "no such library" in child.last_words()
    await forks.close()


async def test_each_has_the_environment_that_its_launcher_has(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORE", "of all")
    forks = ForkServer(["shared"], child_environment())
    own, others = spec(tmp_path, "own", MORE="its own"), spec(tmp_path, "others")
    for one in (own, others):
        assert await (await Child.start(one, forks)).wait_bound(SECONDS)
    assert (said(own)["more"], said(others)["more"]) == ("its own", "of all")
    # The import has set it to 3, in the server alone.
    assert {said(own)["threads"], said(others)["threads"]} == {"1"}
    await forks.close()


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
        assert not any(alive(pid) for pid in before if pid is not None), "each has ended when it is said to"
        await until(lambda: {s.state for s in supervisor.statuses} == {State.UP})
        assert said(first)["parent"] == said(second)["parent"] != server
    finally:
        await supervisor.stop(1.0)
    assert not alive(said(first)["parent"])


async def test_a_service_that_dies_is_seen_though_its_server_stands_still(
    forks: ForkServer, tmp_path: Path
) -> None:
    one = spec(tmp_path)
    child = await Child.start(one, forks)
    assert await child.wait_bound(SECONDS)
    server = said(one)["parent"]
    os.kill(server, signal.SIGSTOP)
    try:
        os.kill(child.pid, signal.SIGTERM)
        # With what it ended is not known.
        assert await asyncio.wait_for(child.wait(), SECONDS) == -signal.SIGKILL
    finally:
        os.kill(server, signal.SIGCONT)


async def test_a_server_that_has_forked_is_not_waited_for_long(
    forks: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await (await Child.start(spec(tmp_path, "first"), forks)).wait_bound(SECONDS)
    server = said(spec(tmp_path, "first"))["parent"]
    assert server != os.getpid()
    monkeypatch.setattr(fork_client, "FORK_SECONDS", 0.5)
    os.kill(server, signal.SIGSTOP)
    second = await asyncio.wait_for(Child.start(spec(tmp_path, "second"), forks), SECONDS)
    assert await second.wait_bound(SECONDS)
    assert said(spec(tmp_path, "second"))["parent"] == os.getpid()
    os.kill(server, signal.SIGCONT)
    # What it forks now nobody waits for.
    left = Path(f"/proc/{server}/task/{server}/children")
    await until(lambda: len(left.read_text().split()) == 1)
    assert second._process.returncode is None
    await second.kill()


@pytest.mark.parametrize("why", ["the server ends", "the server stands still", "a thread is left"])
async def test_what_the_server_does_not_fork_is_started_by_its_command(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    shared = modules / "shared.py"
    if why == "the server ends":
        monkeypatch.setattr(fork_client, "COMMAND", [sys.executable, "-c", "raise SystemExit('no memory')"])
    elif why == "the server stands still":
        monkeypatch.setattr(fork_client, "ANSWER_SECONDS", 0.5)
        monkeypatch.setattr(fork_client, "COMMAND", [sys.executable, "-c", "import time; time.sleep(60)"])
    else:
        left = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
        shared.write_text(f"{SHARED}\n{left}")
    forks = ForkServer(["shared"], child_environment())
    one = spec(tmp_path)
    child = await Child.start(one, forks)
    assert await child.wait_bound(SECONDS)
    told = said(one)
    assert (told["importer"], told["parent"]) == (child.pid, os.getpid())
    await child.kill()
    await forks.close()


async def test_stopping_does_not_wait_for_a_long_import(modules: Path, tmp_path: Path) -> None:
    (modules / "shared.py").write_text("import time; time.sleep(60)")
    supervisor = Supervisor([spec(tmp_path)])
    supervisor.start()
    await asyncio.sleep(0.5)
    started = time.monotonic()
    await asyncio.wait_for(supervisor.stop(SECONDS), SECONDS)
    assert time.monotonic() - started < SECONDS / 2


async def test_a_child_that_nobody_waits_for_is_killed(modules: Path, tmp_path: Path) -> None:
    mark, given_up = tmp_path / "importing", tmp_path / "nobody waits"
    waits = f"while not os.path.exists({str(given_up)!r}): time.sleep(0.01)"
    imports = f"import os, time\nopen({str(mark)!r}, 'w').close()\n{waits}"
    (modules / "shared.py").write_text(f"{imports}\n{SHARED}")
    forks = ForkServer(["shared"], child_environment())
    waiting = asyncio.create_task(Child.start(spec(tmp_path, "given up"), forks))
    await until(mark.exists)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    given_up.touch()
    kept = await Child.start(spec(tmp_path, "kept"), forks)
    assert await kept.wait_bound(SECONDS)
    server = said(spec(tmp_path, "kept"))["parent"]
    left = Path(f"/proc/{server}/task/{server}/children")
    await until(lambda: left.read_text().split() == [str(kept.pid)])
    await forks.close()


async def test_whoever_is_cancelled_in_the_moment_of_an_answer_does_not_go_on(
    forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that stops would wait for it for ever."""
    monkeypatch.setattr(forks, "_running", AsyncMock(return_value=Mock()))
    starting = asyncio.create_task(forks.start(Request("served", [], "served.log", {})))
    await until(lambda: len(forks._awaited) == 1)
    forks._awaited.popleft().set_result(None)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


def test_a_server_ends_with_its_requests(modules: Path) -> None:
    with subprocess.Popen(fork_client.COMMAND, stdin=subprocess.PIPE) as server:
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(SECONDS) == 0


def test_threads_that_somebody_asked_for_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    for pool in POOLS:
        monkeypatch.delenv(pool, raising=False)
    assert fork_client.possible()
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert fork_client.possible()
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert not fork_client.possible()


async def test_a_signal_to_all_reaches_the_services_alone(forks: ForkServer, tmp_path: Path) -> None:
    one = spec(tmp_path)
    child = await Child.start(one, forks)
    assert await child.wait_bound(SECONDS)
    server = said(one)["parent"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(server, number)
    await asyncio.sleep(0.2)
    assert alive(child.pid) and child._process.returncode is None
    os.kill(child.pid, signal.SIGINT)
    assert await asyncio.wait_for(child.wait(), SECONDS) == 1
    assert "KeyboardInterrupt" in child.last_words(), "as Python has it"


async def test_a_launcher_that_ignores_the_end_of_children(modules: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    forks = ForkServer(["shared"], child_environment())
    try:
        child = await Child.start(spec(tmp_path, mode="words"), forks)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert await asyncio.wait_for(child.wait(), SECONDS) == 1
    await forks.close()


async def test_a_child_that_cannot_be_watched_does_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another would be started beside it."""

    def no_descriptor(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(60)")
    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    monkeypatch.setattr(fork_client, "CODE_SECONDS", 0.1)
    async with asyncio.timeout(20):
        assert await fork_client.Forked(child.pid).wait() == -signal.SIGKILL
        assert await child.wait() == -signal.SIGKILL
