"""One service as a child process: its command, its log, its port file.

It is a fork of a process that has imported what it needs (fork_client.py), where that can be, or its command.

1. The child dies with this process (see tether.py) and leads a process group of its own, so that a Ctrl-C
   in the terminal reaches only the launcher, which then ends the services in order.
2. Everything it prints goes to its log file, appended over restarts.
3. It counts as bound once it has written its port file, which is removed before each start; one that serves
   nothing (ranks of a trainer whose first is on another machine) as soon as it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quartet.kit.folder import is_full
from quartet.local.fork_client import ForkServer, Process
from quartet.local.forkserver import Request
from quartet.local.tether import tethered

POLL_SECONDS = 0.05
LOG_TAIL_BYTES = 4096  # enough for the last traceback
LOG_SEARCHED_BYTES = 1 << 16
#: How a service begins the sentence that refuses its configuration.
REFUSAL = "error: "

# One thread for each process: four services share the cores, and spinning OpenMP teams of two processes on
# two cores were measured to cost 3 to 20 times the CPU time. A user's own setting wins.
CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class ChildSpec:
    """What to run. `address` is where it will listen, unless it serves nothing."""

    name: str
    command: Sequence[str]
    address: str
    log_file: Path
    port_file: Path | None
    # Besides what every service gets.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Where it may be a fork: the module that imports what it needs. Its command is `PYTHON -m MODULE ...`.
    preload: str = ""
    #: The launch's token, where it asks for that.
    token_file: Path | None = None
    #: Whether it computes on a GPU or not at all.
    on_device: bool = False
    #: Whether its config names functions of the user's, which looking at it imports.
    imports_own: bool = False
    #: Between the interpreter and its own arguments, where torchrun starts it several times.
    torchrun: Sequence[str] = ()

    @property
    def started_as(self) -> list[str]:
        """The program; `command` is what one process of it runs."""
        python, *arguments = self.command
        return [python, *self.torchrun, *arguments]

    def as_request(self) -> Request:
        """For the fork server."""
        _, _, module, *arguments = self.command
        return Request(module, arguments, str(self.log_file), dict(self.environment))


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a service, and what it gets besides."""
    return {**CHILD_ENVIRONMENT, **os.environ, **(more or {})}


class Child:
    """A started process. Made by `Child.start`."""

    def __init__(self, spec: ChildSpec, process: Process, log_begins: int) -> None:
        self.spec = spec
        self._process = process
        self._log_begins = log_begins

    @classmethod
    async def start(cls, spec: ChildSpec, forks: ForkServer) -> Child:
        """Start it. On the main thread: the kernel ties the child's life to the thread that forked it."""
        if spec.port_file is not None:
            spec.port_file.unlink(missing_ok=True)
        spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_file.open("ab") as log:
            log_begins = log.tell()
            forked = await forks.start(spec.as_request()) if spec.preload else None
            process: Process = forked or await asyncio.create_subprocess_exec(
                *tethered(spec.started_as),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=child_environment(spec.environment), process_group=0,
            )  # fmt: skip
        return cls(spec, process, log_begins)

    @property
    def pid(self) -> int:
        """The process, and the group that it leads."""
        return self._process.pid

    @property
    def bound(self) -> bool:
        """Whether it listens."""
        return self.spec.port_file is None or self.spec.port_file.exists()

    async def wait(self) -> int:
        """Its exit code; negative for a signal."""
        return await self._process.wait()

    async def wait_bound(self, timeout_s: float) -> bool:
        """Whether it listens within the time; False when it ended or the time passed."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self.bound:
            if self._process.returncode is not None or asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def stop(self, drain_s: float) -> int:
        """SIGTERM, so long to drain, then SIGKILL of the whole group."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self._process.wait(), drain_s)
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """SIGKILL to the process and whatever it started."""
        self.kill_group()
        return await self._process.wait()

    def kill_group(self) -> None:
        """SIGKILL to the group, which outlives its leader where the leader left children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The end of its log, and that the log's disk is full, where it is; before that what it refused, each
        once, where that is no part of it.

        Where a service is several processes, its refusal stands far before what those make of its exit.
        """
        said = self._said()
        tail = said[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        before = said[:-LOG_TAIL_BYTES].decode(errors="replace").splitlines()
        refused = dict.fromkeys(line for line in before if line.startswith(REFUSAL) and line not in tail)
        return "\n".join([*refused, tail, *filter(None, [self._unsaid()])])

    def why(self) -> str:
        """In a sentence why it ended: what it refused last, or that it could not say; empty where neither."""
        lines = self._said().decode(errors="replace").splitlines()
        refused = [line.removeprefix(REFUSAL) for line in lines if line.startswith(REFUSAL)]
        return refused[-1] if refused else self._unsaid()

    def _unsaid(self) -> str:
        """That the end of its log may be missing, where it may."""
        log_file = self.spec.log_file
        return f"the disk of its log {log_file} is full" if is_full(log_file.parent) else ""

    def _said(self) -> bytes:
        """The end of what it printed in this life."""
        if not self.spec.log_file.exists():
            return b""
        with self.spec.log_file.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_begins, end - LOG_SEARCHED_BYTES))
            return log.read()
