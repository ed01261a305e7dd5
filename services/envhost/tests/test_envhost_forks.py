"""Workers as forks of a template: as spawned ones are, and where a host has them so. template.py 2, 5,
templates.py 1, worker.py 7. The first tests fork what forked_interpreter.py has, the last the real one.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_interpreter import LIBRARY, SECONDS, Interpreter, alive, children
from quartet.errors import QuartetError
from quartet.v1.envhost_service_pb2 import EnvironmentRef
from quartet_envhost import host as host_module
from quartet_envhost.config import EnvHostConfig
from quartet_envhost.host import EnvironmentHost
from quartet_envhost.process import WorkerDied
from quartet_envhost.templates import Templates, possible
from rollout_outcomes import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")


async def test_a_forked_worker_is_as_a_spawned_one(interpreter: Interpreter, templates: Templates) -> None:
    """template.py 2."""
    spawned, forked = await interpreter.told(None), await interpreter.told(templates)
    assert spawned["importer"] == spawned["pid"] and forked["importer"] != forked["pid"]
    assert forked["same"]["parent"] == os.getpid() and forked["same"]["dies by"] == signal.SIGKILL
    assert forked["same"]["environment"]["MORE"] == "of it"
    assert forked["same"] == spawned["same"]
    assert forked["inheritable"] == [], "what it starts has no part in its lines"


async def test_forked_workers_share_neither_chance_nor_descriptors(
    interpreter: Interpreter, templates: Templates
) -> None:
    """template.py 2: each draws for itself, and no line is another's. Orphans are adopted in the moment of a
    fork alone: what tools leave behind is not for the front to wait for.
    """
    interpreter.write("library", f"{LIBRARY}\nimport numpy.random, sympy.core.random")
    workers = await asyncio.gather(*(interpreter.told(templates) for _ in range(3)))
    assert len({one["importer"] for one in workers}) == interpreter.templates_started == 1
    assert [len(one["own"]) for one in workers] == [6] * 3
    for drawn in zip(*(one["own"] for one in workers), strict=True):
        assert len(set(drawn)) == 3, drawn
    sockets = [socket for one in workers for socket in one["sockets"]]
    assert len(sockets) == len(set(sockets)) >= 3
    adopts = ctypes.c_int(7)
    ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    assert adopts.value == 0


ENDS = {
    "exits": "exited with code 3",
    "ends": "exited with code 4",
    "aborts": "was killed by SIGABRT",
    "leaves a child": "exited with code 5",
}


@pytest.mark.parametrize("forks", [True, False])
async def test_how_a_worker_ended_is_told(
    interpreter: Interpreter, templates: Templates, forks: bool
) -> None:
    """templates.py 1, process.py 1-2; also of those that are killed and stopped, by their pid, and where what
    one forked has its line."""
    for args, how in ENDS.items():
        worker = await interpreter.worker(templates if forks else None)
        with pytest.raises(WorkerDied, match=f"worker {worker.pid} {how}"):
            await asyncio.wait_for(worker.open({"args": args, "max_file_bytes": 1 << 30}), SECONDS)
        assert await worker.wait() == f"worker {worker.pid} {how}"
        assert worker.forked == forks
    if not forks:
        return
    killed, stopped = [await interpreter.worker(templates) for _ in range(2)]
    os.kill(killed.pid, signal.SIGTERM)
    assert await asyncio.wait_for(killed.wait(), SECONDS) == f"worker {killed.pid} was killed by SIGTERM"
    await asyncio.wait_for(stopped.stop(), SECONDS)
    assert not alive(stopped.pid) and stopped._process.returncode == 0


FRONT = """
import asyncio, os, sys
from quartet_envhost.process import WorkerProcess
from quartet_envhost.templates import Templates
async def main():
    templates = Templates(60)
    worker = await WorkerProcess.spawn(sys.executable, {}, templates)
    opening = asyncio.create_task(worker.open({"args": "hangs", "max_file_bytes": 1 << 30}))
    await asyncio.sleep(0.5)
    print(worker.pid, worker.forked, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_killed_front_takes_its_template_and_its_workers_along(interpreter: Interpreter) -> None:
    """template.py 2, 5: by the kernel, whatever they are at."""
    environment = os.environ | interpreter.env
    with subprocess.Popen(
        [sys.executable, "-c", FRONT], stdout=subprocess.PIPE, text=True, env=environment
    ) as front:
        assert front.stdout is not None
        worker, forked = front.stdout.readline().split()
        assert forked == "True"
        found = Path(f"/proc/{front.pid}/task/{front.pid}/children").read_text().split()
        assert worker in found and len(found) == 2
        front.kill()
        deadline = time.monotonic() + SECONDS
        while any(alive(int(pid)) for pid in found):
            assert time.monotonic() < deadline
            time.sleep(0.02)


async def test_what_a_worker_prints_goes_where_the_front_prints_by_then(
    interpreter: Interpreter, templates: Templates, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    await interpreter.told(templates)
    capfd.readouterr()
    told = await interpreter.told(templates, "prints")
    assert capfd.readouterr().err == f"printed by {told['pid']}\n"
    kept = os.dup(2)
    with (tmp_path / "log").open("w") as log:
        os.dup2(log.fileno(), 2)
        try:
            told = await interpreter.told(templates, "prints")
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    assert (tmp_path / "log").read_text() == f"printed by {told['pid']}\n"


async def test_a_worker_that_ends_does_what_is_left_for_its_exit(
    interpreter: Interpreter, templates: Templates, capfd: pytest.CaptureFixture[str]
) -> None:
    """ending.py 1-2: and takes nothing apart, which would copy all that it shares with its template."""
    worker = await interpreter.worker(templates)
    capfd.readouterr()
    await interpreter.loaded(worker, "leaves work")
    assert capfd.readouterr().err == "buffered\nwaited for\nregistered\n"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    def go() -> None:
        monkeypatch.setattr(host_module, "possible", lambda: False)

    yield go


@pytest.mark.parametrize(("why", "workers"), [("", 2), ("switched off", 1), ("elsewhere", 1)])
async def test_a_host_forks_where_it_can_and_may(
    envs_python: str, elsewhere: Callable[[], None], why: str, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real Verifiers, and that the log says which way it was; the host leaves no process."""
    if why == "elsewhere":
        elsewhere()
    settings = {
        "interact_only": True,
        "python": envs_python,
        "workers": workers,
        "fork_workers": why != "switched off",
    }
    before = children()
    host = EnvironmentHost(EnvHostConfig.model_validate(settings))
    try:
        await host.describe(EnvironmentRef(id="reverse-text"))
        (pool,) = host._pools.values()
        await asyncio.wait_for(until(lambda: len(pool.workers) == workers), SECONDS)
        assert [one.forked for one in pool.workers] == [why == ""] * workers
        assert len(children() - before) == workers + (why == ""), "with the one template of both"
    finally:
        await host.close()
    await asyncio.wait_for(until(lambda: children() <= before), SECONDS)
    log = "".join(capfd.readouterr())
    assert log.count("forked" if why == "" else "spawned") >= workers
    assert ("this system is not Linux" in log) == (why == "elsewhere")


async def test_a_start_that_waits_for_its_template_has_no_longer_than_any(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """keeping.py 2: all of the start counts, also the wait for who waits, too."""
    interpreter.write("library", f"{LIBRARY}\nimport time; time.sleep(600)")
    monkeypatch.setattr("quartet_envhost.keeping.MAX_FAILED_STARTS", 1)
    settings = {
        "interact_only": True,
        "load_timeout_seconds": 3.0,
        "workers": 3,
        "environments": {"my-env": {"env": interpreter.env}},
    }
    host = EnvironmentHost(EnvHostConfig.model_validate(settings))
    started = time.monotonic()
    with pytest.raises(QuartetError, match="environment 'my-env' was not loaded within 3 s"):
        await asyncio.wait_for(host.describe(EnvironmentRef(id="my-env")), SECONDS)
    log = ""
    while log.count("worker did not start") < 3:
        await asyncio.sleep(0.05)
        log += "".join(capfd.readouterr())
        assert time.monotonic() - started < 5.5, log
    await host.close()


def test_this_system_can_where_its_interpreter_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert possible()
    monkeypatch.delattr(os, "pidfd_open")  # one that was built where Linux was older
    assert not possible()
