"""Workers as forks of a template: as spawned ones are, whatever happens to the template. template.py 1-5,
templates.py 1-5, worker.py 7.

What stands for Verifiers here is a module that says by whom it was imported, so that the interpreter of these
tests has workers, too. The last tests fork the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.v1.envhost_service_pb2 import EnvironmentRef
from quartet_envhost import adopting as adopting_module
from quartet_envhost import host as host_module
from quartet_envhost import process as process_module
from quartet_envhost import templates as templates_module
from quartet_envhost.config import EnvHostConfig
from quartet_envhost.host import EnvironmentHost
from quartet_envhost.process import WorkerDied, WorkerProcess
from quartet_envhost.templates import Templates, possible
from rollout_outcomes import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")

SECONDS = 60.0
#: Every interpreter of these tests begins with it: what is imported ahead, and what loading an environment
#: does: tell what its process is like.
SITE = """
import importlib, os, sys
with open(os.path.join(os.path.dirname(__file__), "started"), "a") as file:
    file.write(f"{os.getpid()} {'--template' in sys.orig_argv}\\n")
if "quartet_envhost.worker" in sys.orig_argv:
    import quartet_envhost.loading
    def import_ahead():
        importlib.import_module("library")
    def load(settings):
        import told
        return told.load(settings)
    quartet_envhost.loading.import_ahead, quartet_envhost.loading.load = import_ahead, load
"""
TOLD = """
import ctypes, importlib, json, os, random, re, secrets, signal, sys, time, uuid
import library
from quartet.errors import QuartetError

SEEDED = "numpy.random", "sympy.core.random"

def links():
    for one in os.listdir("/proc/self/fd"):
        try:
            yield int(one), os.readlink(f"/proc/self/fd/{one}")
        except FileNotFoundError:
            pass

def facts(settings):
    lines = open("/proc/self/status").read().splitlines()
    status = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
    opened = dict(links())
    command = open("/proc/self/cmdline").read().replace("\\0", " ")
    return {
        "same": {
            "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
            "parent": os.getppid(),
            "dies by": death.value,
            "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
            "threads": status["Threads"],
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "limits": open("/proc/self/limits").read(),
            "nice": os.nice(0), "mask": status["Umask"],
            "open": sorted(re.sub(r"\\d+", "N", link) for link in opened.values()),
            "standard": [re.sub(r"\\d+", "N", opened[one]) for one in range(3)],
            "stack": opened[settings["stack_fd"]],
            "path": sys.path, "main": sys.modules["__main__"].__spec__.name, "flags": str(sys.flags),
            "argv": [one for one in sys.argv + sys.orig_argv if not one.startswith("--fd=")],
            "command": re.sub("--fd=[0-9]+", "", command).split(),
            "comm": open("/proc/self/comm").read().strip()[:6],
        },
        "own": [
            random.random(), uuid.uuid4().hex, secrets.token_hex(), os.getpid(),
            *(sys.modules[one].random() for one in SEEDED if one in sys.modules),
        ],
        "sockets": [link for link in opened.values() if link.startswith("socket")],
        "inheritable": [link for one, link in opened.items() if one > 2 and os.get_inheritable(one)],
        "pid": os.getpid(), "importer": library.importer,
        "code": importlib.import_module("my_env").CODE if settings["args"] == "code" else "",
    }

def load(settings):
    match settings["args"]:
        case "exits": sys.exit(3)
        case "ends": os._exit(4)
        case "aborts": os.abort()
        case "prints": print("printed by", os.getpid(), flush=True)
        case "hangs": time.sleep(600)
        case "computes":
            import numpy
            numpy.ones((500, 500)) @ numpy.ones((500, 500))
    with open(f"{__file__}.{os.getpid()}", "w") as file:
        json.dump(facts(settings), file)
    raise QuartetError("INVALID_REQUEST", "that is all")
"""
LIBRARY = "import os\nimporter = os.getpid()\n"


class Interpreter:
    """The one of these tests, with what it imports in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages = folder / "site-packages"
        self.own = folder / "own"
        self.packages.mkdir()
        self.own.mkdir()
        path = os.pathsep.join(map(str, (self.own, folder, self.packages)))
        self.env = {"PYTHONPATH": path, "MORE": "of it"}
        for name, text in {"sitecustomize": SITE, "told": TOLD, "library": LIBRARY}.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(text)

    @property
    def templates_started(self) -> int:
        return (self.folder / "started").read_text().count("True")

    async def worker(self, templates: Templates | None) -> WorkerProcess:
        return await asyncio.wait_for(WorkerProcess.spawn(sys.executable, self.env, templates), SECONDS)

    async def told(self, templates: Templates | None, args: str = "") -> dict[str, Any]:
        """What a worker tells of itself; it has ended by then."""
        worker = await self.worker(templates)
        return await self.loaded(worker, args)

    async def loaded(self, worker: WorkerProcess, args: str = "") -> dict[str, Any]:
        with pytest.raises(QuartetError, match="that is all"):
            await asyncio.wait_for(worker.open({"args": args, "max_file_bytes": 1 << 30}), SECONDS)
        assert await asyncio.wait_for(worker.wait(), SECONDS) == f"worker {worker.pid} exited with code 0"
        facts: dict[str, Any] = json.loads((self.folder / f"told.py.{worker.pid}").read_text())
        return facts


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    # A busy machine takes longer than that to end an interpreter.
    monkeypatch.setattr(process_module, "EXIT_GRACE_S", SECONDS)
    return Interpreter(tmp_path)


@pytest.fixture
async def templates() -> AsyncIterator[Templates]:
    made = Templates(SECONDS)
    before = children()
    yield made
    await made.close()
    # No template, no worker, and nothing that waits to be collected.
    await asyncio.wait_for(until(lambda: children() <= before), SECONDS)


def children() -> set[int]:
    """Of this process, also those that have ended."""
    while True:
        try:
            return {
                int(pid)
                for task in Path("/proc/self/task").iterdir()
                for pid in (task / "children").read_text().split()
            }
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread ended meanwhile, and its children are another one's


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


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


ENDS = {"exits": "exited with code 3", "ends": "exited with code 4", "aborts": "was killed by SIGABRT"}


@pytest.mark.parametrize("forks", [True, False])
async def test_how_a_worker_ended_is_told(
    interpreter: Interpreter, templates: Templates, forks: bool
) -> None:
    """templates.py 1; also of those that are killed and stopped, by their pid."""
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


async def test_the_end_of_a_template_is_nothing_to_its_workers_and_the_next_has_a_new_one(
    interpreter: Interpreter, templates: Templates
) -> None:
    """templates.py 1, 2; also where it ends by itself (template.py 5)."""
    before = children()
    worker = await interpreter.worker(templates)
    await asyncio.wait_for(worker.spoke.wait(), SECONDS)
    (template,) = children() - before - {worker.pid}
    os.kill(template, signal.SIGKILL)
    await asyncio.wait_for(until(lambda: not alive(template)), SECONDS)
    later = await interpreter.told(templates)
    assert later["importer"] not in (template, later["pid"]) and interpreter.templates_started == 2
    assert alive(worker.pid) and worker.alive
    assert (await interpreter.loaded(worker))["importer"] == template


#: A front that has a worker whose loop does not turn.
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


UNFIT = {
    "threads": (
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "its imports have started threads (1)",
    ),
    "descriptors": (
        "import os; left = os.open('/dev/zero', os.O_RDONLY)",
        "have left descriptors open: /dev/zero",
    ),
    "a failing import": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    "processes": (
        "import subprocess; left = subprocess.Popen(['sleep', '600'])",
        "its imports have left processes running (1)",
    ),
    "a page of reasons": ("raise ImportError('why, ' * 100_000)", "ImportError: why, why"),
    "an exit": ("import os, sys; '--template' in sys.orig_argv and os._exit(7)", "ended with code 7"),
}


@pytest.mark.parametrize("what", UNFIT)
async def test_a_template_that_is_unfit_is_named_once_and_its_workers_are_spawned(
    interpreter: Interpreter, templates: Templates, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """template.py 3, templates.py 3."""
    code, why = UNFIT[what]
    interpreter.write("library", f"{LIBRARY}\n{code}")
    workers = [await interpreter.worker(templates) for _ in range(2)]
    assert not any(one.forked for one in workers) and interpreter.templates_started == 1
    log = "".join(capfd.readouterr())
    assert log.count("workers are spawned, not forked") == 1 and why in log, log
    for one in workers:
        one.kill("enough")
        await one.wait()


async def test_what_an_interpreter_cannot_run_is_told_by_the_worker(
    interpreter: Interpreter, templates: Templates
) -> None:
    """templates.py 3: the words are those that it always had."""
    interpreter.env["PYTHONPATH"] = ""  # this interpreter has no Verifiers
    worker = await interpreter.worker(templates)
    with pytest.raises(QuartetError, match="has no verifiers; in the repository: "):
        await asyncio.wait_for(worker.open({"id": "x", "args": {}, "max_file_bytes": 1 << 30}), SECONDS)
    assert not worker.forked
    with pytest.raises(WorkerDied, match="interpreter /nowhere/python does not start: No such file"):
        await WorkerProcess.spawn("/nowhere/python", {}, templates)


async def test_an_interpreter_of_an_earlier_release_has_spawned_workers(
    interpreter: Interpreter, templates: Templates, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    refuses = 'case "$*" in *--template*) exit 2;; esac'
    python.write_text(f'#!/bin/sh\n{refuses}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    worker = await WorkerProcess.spawn(str(python), interpreter.env, templates)
    await asyncio.wait_for(worker.spoke.wait(), SECONDS)
    assert not worker.forked
    await worker.stop()


async def test_threads_that_their_library_ends_at_a_fork_keep_nobody_from_it(
    interpreter: Interpreter, templates: Templates
) -> None:
    """template.py 3: numpy's matrix products have as many threads as in a spawned worker."""
    interpreter.env["OPENBLAS_NUM_THREADS"] = "2"
    interpreter.write("library", f"{LIBRARY}\nimport numpy")
    spawned, forked = [await interpreter.told(one, "computes") for one in (None, templates)]
    assert forked["same"]["threads"] == spawned["same"]["threads"] == "2"
    assert forked["importer"] != forked["pid"]


async def test_an_environment_that_was_changed_is_read_anew(
    interpreter: Interpreter, templates: Templates
) -> None:
    """template.py 1; also where the clock of files has not moved on since the template looked."""
    before = interpreter.own.stat()
    await interpreter.told(templates)
    for code in ("before", "and after"):
        (interpreter.own / "my_env.py").write_text(f"CODE = {code!r}\n")
        os.utime(interpreter.own, ns=(before.st_atime_ns, before.st_mtime_ns))
        told = await interpreter.told(templates, "code")
        assert told["code"] == code and told["importer"] != told["pid"]
    assert interpreter.templates_started == 1


async def test_an_interpreter_whose_packages_were_changed_has_a_new_template(
    interpreter: Interpreter, templates: Templates
) -> None:
    """template.py 4: also a package that is there by a path file, which only a start reads."""
    first, second = [await interpreter.told(templates) for _ in range(2)]
    (interpreter.packages / "installed.pth").write_text("import installed\n")
    third = await interpreter.told(templates)
    assert first["importer"] == second["importer"] != third["importer"] != third["pid"]


async def test_each_set_of_variables_has_a_template_of_its_own(
    interpreter: Interpreter, templates: Templates
) -> None:
    """templates.py 2: they count while imports run."""
    first = await interpreter.told(templates)
    interpreter.env["MORE"] = "of another"
    second = await interpreter.told(templates)
    assert second["same"]["environment"]["MORE"] == "of another" and first["importer"] != second["importer"]


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


async def test_whoever_stops_waiting_leaves_no_process(
    interpreter: Interpreter, templates: Templates, tmp_path: Path
) -> None:
    """templates.py 5; the template goes on with what it began."""
    go = tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    interpreter.write("library", f"{LIBRARY}\n{waits}")
    before = children()
    waiting = asyncio.create_task(interpreter.worker(templates))
    await asyncio.wait_for(until((tmp_path / "started").exists), SECONDS)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    go.touch()
    told = await interpreter.told(templates)
    assert interpreter.templates_started == 1
    await asyncio.wait_for(until(lambda: children() - before == {told["importer"]}), SECONDS)


async def test_a_template_that_is_not_ready_in_time_is_killed(
    interpreter: Interpreter, capfd: pytest.CaptureFixture[str]
) -> None:
    """templates.py 4."""
    interpreter.write(
        "library", f"{LIBRARY}\nimport sys, time\n'--template' in sys.orig_argv and time.sleep(600)"
    )
    before, templates = children(), Templates(0.5)
    worker = await interpreter.worker(templates)
    assert not worker.forked and "not ready within 0.5 s" in "".join(capfd.readouterr())
    assert children() - before == {worker.pid}
    await worker.stop()
    worker = await interpreter.worker(templates)
    assert not worker.forked and interpreter.templates_started == 1, "the next start does not wait for it"
    await worker.stop()


async def test_what_imports_have_started_ends_with_the_template(interpreter: Interpreter) -> None:
    """templates.py 4."""
    waits = "subprocess.run('echo $$ > $PIDS; exec sleep 600', shell=True)"
    interpreter.write(
        "library", f"{LIBRARY}\nimport sys, subprocess\n'--template' in sys.orig_argv and {waits}"
    )
    pids = interpreter.folder / "pids"
    interpreter.env["PIDS"] = str(pids)
    templates = Templates(SECONDS)
    waiting = asyncio.create_task(interpreter.worker(templates))
    await asyncio.wait_for(until(lambda: pids.exists() and pids.read_text().endswith("\n")), SECONDS)
    await templates.close()
    await asyncio.wait_for(until(lambda: not alive(int(pids.read_text()))), SECONDS)
    await (await waiting).stop()


async def test_a_template_that_is_killed_as_it_starts_is_tried_again(
    interpreter: Interpreter, templates: Templates, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """templates.py 3: that says nothing of the next."""
    mark = tmp_path / "full"
    kills = "'--template' in sys.orig_argv and os.kill(importer, 9)"
    interpreter.write("library", f"{LIBRARY}\nimport sys; os.path.exists({str(mark)!r}) and {kills}")
    mark.touch()
    told = await interpreter.told(templates)
    assert told["importer"] == told["pid"]
    assert "their template was killed by signal 9" in "".join(capfd.readouterr())
    mark.unlink()
    told = await interpreter.told(templates)
    assert told["importer"] != told["pid"]


async def test_a_template_that_stands_still_is_killed(
    interpreter: Interpreter,
    templates: Templates,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """templates.py 4; what forked before is tried again."""
    monkeypatch.setattr(templates_module, "FORK_SECONDS", 2.0)
    for _ in range(2):
        forked = await interpreter.told(templates)
        assert forked["importer"] != forked["pid"]
        os.kill(forked["importer"], signal.SIGSTOP)
        told = await interpreter.told(templates)
        assert told["importer"] == told["pid"]
        assert "their template did not fork within 2 s" in "".join(capfd.readouterr())
        assert not alive(forked["importer"])
    assert (await interpreter.told(templates))["importer"] != told["pid"]
    assert interpreter.templates_started == 3


#: A fork of which the template, who is between it and the worker, or the worker comes to harm.
HARMED = """
import os, signal, time
fork = os.fork
def harmed():
    who = os.getpid()
    pid = fork()
    if who == importer:
        at = "template" if pid else "between"
    else:
        at = "between, later" if pid else "worker"
    HARM
    return pid
os.fork = harmed
"""
HARMS = {
    "the template": ('if at == "between, later": os.kill(importer, 9); time.sleep(0.1)', True),
    "between, with a worker": ('if at == "between, later": os.kill(os.getpid(), 9)', True),
    "between, without": ('if at == "between": os.kill(os.getpid(), 9)', False),
    "the worker": ('if at == "worker": os.kill(os.getpid(), 9)', False),
    "the worker, stopped": ('if at == "worker": os.kill(os.getpid(), signal.SIGSTOP)', False),
}


@pytest.mark.parametrize("who", HARMS)
async def test_a_kill_amid_a_fork_leaves_no_process_and_each_worker_its_own_line(
    interpreter: Interpreter, templates: Templates, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """template.py 6, templates.py 4: also of the next; the fixture sees whether all were waited for."""
    monkeypatch.setattr(templates_module, "FORK_SECONDS", 1.0)
    harm, forked = HARMS[who]
    interpreter.write("library", LIBRARY + HARMED.replace("HARM\n", f"{harm}\n"))
    workers = [await interpreter.worker(templates) for _ in range(2)]
    assert [one.forked for one in workers] == [forked] * 2
    told = [await interpreter.loaded(one) for one in workers]
    assert [one["pid"] for one in told] == [one.pid for one in workers]


async def test_templates_that_do_not_fork_are_not_started_for_ever(
    interpreter: Interpreter, templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """templates.py 4."""
    monkeypatch.setattr(templates_module, "FORK_SECONDS", 0.2)
    interpreter.write("library", LIBRARY + HARMED.replace("HARM\n", "time.sleep(600)\n"))
    for _ in range(3):
        await (await interpreter.worker(templates)).stop()
    assert interpreter.templates_started == 2


async def test_workers_are_forked_where_ends_of_children_are_ignored(
    interpreter: Interpreter, templates: Templates
) -> None:
    """template.py 6: as whoever started the front may have it; each answer is to its own request."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        for _ in range(5):
            worker = await interpreter.worker(templates)
            with pytest.raises(QuartetError, match="that is all"):
                await asyncio.wait_for(worker.open({"args": "", "max_file_bytes": 1 << 30}), SECONDS)
            await asyncio.wait_for(worker.wait(), SECONDS)
            assert worker.forked and (interpreter.folder / f"told.py.{worker.pid}").exists()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert interpreter.templates_started == 1


async def test_no_more_templates_are_kept_than_may_be(
    interpreter: Interpreter, templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """templates.py 2."""
    monkeypatch.setattr(templates_module, "MAX_TEMPLATES", 2)
    before, importers = children(), []
    for one in "abacb":
        interpreter.env["MORE"] = one
        importers.append((await interpreter.told(templates))["importer"])
    a, b, again, c, anew = importers
    assert again == a and anew != b
    assert children() - before == {c, anew}


@pytest.mark.parametrize("who", ["==", "!="])
async def test_a_template_that_cannot_fork_says_so_and_may_later(
    interpreter: Interpreter,
    templates: Templates,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    who: str,
) -> None:
    """templates.py 3; itself, or who is between it and a worker."""
    full = tmp_path / "full"
    refuses = f"""
import errno, os
fork = os.fork
def refused():
    if os.path.exists({str(full)!r}) and os.getpid() {who} importer:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()
os.fork = refused
"""
    interpreter.write("library", f"{LIBRARY}\n{refuses}")
    full.touch()
    told = await interpreter.told(templates)
    assert told["importer"] == told["pid"]
    assert "cannot be forked: Resource temporarily unavailable" in "".join(capfd.readouterr())
    full.unlink()
    told = await interpreter.told(templates)
    assert told["importer"] != told["pid"] and interpreter.templates_started == 1


async def test_orphans_that_were_adopted_all_the_same_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """adopting.py 2."""
    monkeypatch.setattr(adopting_module, "COLLECT_S", 0.05)
    before = children()
    with adopting_module.adopting():
        leaves = ("sh", "-c", "sleep 0.1 &")
        await (await asyncio.create_subprocess_exec(*leaves, start_new_session=True)).wait()
        (orphan,) = children() - before
        await asyncio.wait_for(until(lambda: not alive(orphan)), SECONDS)
    assert orphan in children()
    await asyncio.wait_for(until(lambda: children() <= before), SECONDS)


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
