"""An interpreter whose workers are forked of a template: what stands for Verifiers in it is a module that
says by whom it was imported, so that the interpreter of these tests has workers, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet_envhost.process import WorkerProcess
from quartet_envhost.templates import Templates

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
import atexit, ctypes, importlib, json, os, random, re, secrets, signal, sys, threading, time, uuid
import library
from quartet.errors import QuartetError

SEEDED = "numpy.random", "sympy.core.random"

class Left:
    def __del__(self):
        os.write(1, b"taken apart")

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
        case "leaves a child": os._exit(5) if os.fork() else time.sleep(600)
        case "prints": print("printed by", os.getpid(), flush=True)
        case "leaves work":
            global left
            left = Left()
            print("buffered")
            atexit.register(print, "registered")
            threading.Thread(target=lambda: (threading.main_thread().join(), print("waited for"))).start()
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
