"""The launcher's side of the fork server (forkserver.py): services as forks of one process.

1. The server is started with the first service that wants it, and again where it has ended.
2. That a service has ended is seen here, by its descriptor, whatever the server does; with what it ended is
   for the server to say, within CODE_SECONDS. Of a server that has ended, children were killed with it.
3. A service that the server cannot fork, or not within ANSWER_SECONDS (FORK_SECONDS once it has answered), is
   not started here. One that it forks later than that, or that nobody waits for any more, is killed.
4. What the imports print is in LOG, beside the log of the service that wanted the server. Where they print
   nothing there is none; it ends at LOG_BYTES.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from quartet.local.forkserver import POOLS, Request
from quartet.local.tether import tethered

COMMAND = (sys.executable, "-m", "quartet.local.forkserver")
#: With the imports before the first answer: torch from a slow disk takes half a minute.
ANSWER_SECONDS = 120.0
#: After it. A fork takes milliseconds.
FORK_SECONDS = 5.0
#: It is told at once, by a server that is not stopped.
CODE_SECONDS = 1.0
LOG = "forkserver.log"
#: Some warnings and tracebacks. It says the same at every start.
LOG_BYTES = 1 << 16


def possible() -> bool:
    """Whether this system can do it, and nobody asked for threads that the imports would have to start."""
    if sys.platform != "linux" or any(os.environ.get(pool, "1") != "1" for pool in POOLS):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))  # Linux 5.3
    except (AttributeError, OSError):
        return False
    return True


class Process(Protocol):
    """What a launcher asks of a process that it started."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


class Forked:
    """A child of the fork server, as a Process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._patience = CODE_SECONDS
        self._descriptor = -1
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone()
        except OSError:  # no descriptor is left: a child that nobody can watch must not live
            os.kill(pid, signal.SIGKILL)
            self._gone()
        else:
            asyncio.get_running_loop().add_reader(self._descriptor, self._gone)

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None until it is known."""
        return self._code.result() if self._code.done() else None

    async def wait(self) -> int:
        """Its exit code, negative for a signal. Whoever stops waiting leaves it running."""
        return await asyncio.shield(self._code)

    def send_signal(self, number: int, /) -> None:
        """Nothing once its exit code is known; before that, ProcessLookupError where it has gone already."""
        if self._descriptor >= 0:
            # By the descriptor: once the server has waited for it, the pid may be another's.
            signal.pidfd_send_signal(self._descriptor, number)

    def ended(self, code: int) -> None:
        """It is known with what; what was known before stays."""
        if not self._code.done():
            self._code.set_result(code)

    def orphaned(self) -> None:
        """The server has ended, and will not say with what."""
        self._patience = 0.0
        if self._descriptor < 0:
            self.ended(-signal.SIGKILL)

    def _gone(self) -> None:
        loop = asyncio.get_running_loop()
        if self._descriptor >= 0:
            loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        loop.call_later(self._patience, self.ended, -signal.SIGKILL)


class ForkServer:
    """One for the services of a launcher, with the modules that they need. A child as any other: it starts on
    the main thread of the process.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._modules = list(modules)
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._answered = False
        self._starting = asyncio.Lock()
        self._awaited: deque[asyncio.Future[Forked | None]] = deque()  # one for each service at most
        self._living: dict[int, Forked] = {}

    async def start(self, request: Request) -> Process | None:
        """The service, once it is forked; None where it is not."""
        async with self._starting:
            process = await self._running(Path(request.log).with_name(LOG))
        answer: asyncio.Future[Forked | None] = asyncio.get_running_loop().create_future()
        self._awaited.append(answer)
        assert process.stdin is not None
        process.stdin.write(request.line())
        try:
            # A server that has ended does not take it: the listener answers. (Not by wait_for: where it is
            # cancelled in the moment of an answer, it goes on with that before Python 3.12.)
            async with asyncio.timeout(FORK_SECONDS if self._answered else ANSWER_SECONDS):
                return await answer
        except TimeoutError:
            return None if answer.cancelled() else answer.result()  # of the moment

    async def close(self) -> None:
        """End the server, and whatever child is left."""
        self.kill_now()
        if self._listener is not None:
            await asyncio.wait({self._listener})

    def kill_now(self) -> None:
        """SIGKILL to the server, which takes its children along, without waiting."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _running(self, log: Path) -> asyncio.subprocess.Process:
        if self._listener is not None and self._process is not None:
            if self._process.returncode is None:
                return self._process
            await asyncio.wait({self._listener})
        self._answered = False
        self._process = process = await asyncio.create_subprocess_exec(
            *tethered([*COMMAND, *self._modules]),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=self._environment, process_group=0,
        )  # fmt: skip
        self._listener = asyncio.create_task(self._listen(process, log), name="fork-server")
        return process

    async def _listen(self, process: asyncio.subprocess.Process, log: Path) -> None:
        """Take the answers of one server until it ends, and what it prints."""
        assert process.stdout is not None and process.stderr is not None
        printed = asyncio.create_task(_write_down(process.stderr, log))
        try:
            async for line in process.stdout:
                said = json.loads(line)
                self._answered = True
                if "forked" in said:
                    self._forked(said["forked"])
                else:
                    self._living.pop(said["ended"]).ended(said["code"])
            await process.wait()
        finally:
            for child in self._living.values():
                child.orphaned()
            self._living.clear()
            while self._awaited:
                self._answer(None)
            # A process that an import left behind may hold the other end for ever.
            await asyncio.wait({printed}, timeout=CODE_SECONDS)
            printed.cancel()

    def _forked(self, pid: int) -> None:
        if pid == 0:
            self._answer(None)
            return
        self._living[pid] = child = Forked(pid)
        if not self._answer(child):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _answer(self, child: Forked | None) -> bool:
        """Whether somebody still waits for it."""
        awaited = self._awaited.popleft()
        if awaited.cancelled():
            return False
        awaited.set_result(child)
        return True


async def _write_down(printed: asyncio.StreamReader, log: Path) -> None:
    """All of it is read, so that nobody waits for room; LOG_BYTES of it are kept."""
    while said := await printed.read(LOG_BYTES):
        with contextlib.suppress(OSError), log.open("ab") as file:  # a full disk
            file.write(said[: max(0, LOG_BYTES - file.tell())])
