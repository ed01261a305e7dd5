"""Trainer and inference without their imports: importing torch takes seconds of a core in every process that
does it, and in a session one does (the fixture `importer`).

Launchers take its imports with the environment of `with_imports_of`. Services that tests start one by one
(the fixture `forks`) are started as a launcher does it, as forks of one process that has them; others than
these two by their commands.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from quartet.local.child import child_environment
from quartet.local.fork_client import COMMAND
from quartet.local.forkserver import Request

FORKED = ("trainer", "inference")
PRELOADS = [f"quartet_{service}.preload" for service in FORKED]
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
#: What puts a fork of the importer in the place of a fork server.
IMPORTED = Path(__file__).resolve().parent / "imported"
#: On a machine under load: of a service that takes 10 s elsewhere, and from a signal to the word of its end.
START_SECONDS, END_SECONDS = 300.0, 60.0


def with_imports_of(importer: str, *folders: Path) -> dict[str, str]:
    """Of the environment of a command whose fork server takes the imports from the process at this address,
    which may be empty; modules are found in these folders, too."""
    paths = [str(IMPORTED), *map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "QUARTET_TESTS_IMPORTED": importer}


class Process(Protocol):
    """What tests ask of a service that they started, which a subprocess.Popen can answer."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float = END_SECONDS) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


@contextmanager
def listening(process: Process, log: Path, *port_files: Path) -> Iterator[None]:
    """A service that prints into the log, from when it has written these files; it is stopped afterwards."""
    try:
        deadline = time.monotonic() + START_SECONDS
        while not all(file.exists() for file in port_files):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=END_SECONDS)
        finally:
            process.kill()


class Forks:
    """The process, and what it says of its children. They end with it."""

    def __init__(self, folder: Path, importer: str) -> None:
        """Where services run, and who has what they import."""
        self._folder = folder
        imports = with_imports_of(importer, BENCHMARKS)
        self._environment = child_environment({"HF_HUB_OFFLINE": "1", **imports})
        self._server = subprocess.Popen(
            [*COMMAND, *PRELOADS],
            cwd=folder, env=self._environment, process_group=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self._codes: dict[int, int] = {}

    def start(self, service: str, arguments: list[str], log: Path) -> Process:
        """It prints into the log. The first that is a fork waits for the imports."""
        if service in FORKED:
            return self.fork(f"quartet_{service}", arguments, log)
        command = [sys.executable, "-m", f"quartet_{service}", *arguments]
        with log.open("wb") as out:
            return subprocess.Popen(command, cwd=self._folder, env=self._environment, stdout=out, stderr=out)

    def fork(self, module: str, arguments: list[str], log: Path) -> Process:
        """A module of theirs or of benchmarks/, as `python -m MODULE ARGUMENT...`."""
        assert self._server.stdin is not None
        log.touch()
        self._server.stdin.write(Request(module, arguments, str(log), {}).line())
        while "forked" not in (said := self._said()):
            pass
        assert said["forked"], "the process has several threads, or cannot fork"
        return _Forked(said["forked"], self)

    def code_of(self, pid: int, seconds: float) -> int | None:
        """With what a fork has ended; None where it has not within this time."""
        until = time.monotonic() + seconds
        while pid not in self._codes:
            left = max(0.0, until - time.monotonic())
            if not select.select([self._server.stdout], [], [], left)[0]:
                return None
            self._said()
        return self._codes[pid]

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()

    def _said(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        said: dict[str, Any] = json.loads(self._server.stdout.readline())
        if "ended" in said:
            self._codes[said["ended"]] = said["code"]
        return said


class _Forked:
    """A Process, whose parent says that it has ended."""

    def __init__(self, pid: int, forks: Forks) -> None:
        self._pid = pid
        self._forks = forks

    def poll(self) -> int | None:
        return self._forks.code_of(self._pid, 0.0)

    def wait(self, timeout: float = END_SECONDS) -> int:
        code = self._forks.code_of(self._pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self._pid}", timeout)
        return code

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
