"""The launcher's side of the fork server (forkserver.py): services as forks of one process.

1. The server is started with the first service that wants it, and again where it has ended; its children
   have died with it then.
2. A service whose server ended before it was forked counts as one that ended as the server did.
3. A child that nobody waits for any more when it is forked is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from quartet.local.forkserver import Request
from quartet.local.tether import tethered

COMMAND = [sys.executable, "-m", "quartet.local.forkserver"]


class Process(Protocol):
    """What a launcher asks of a process that it started."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int, /) -> None: ...


class Forked:
    """A child of the fork server, as a Process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        return self._code.result() if self._code.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def send_signal(self, signal: int, /) -> None:
        if not self._code.done():
            os.kill(self.pid, signal)

    def ended(self, code: int) -> None:
        """Said by the server, or by its end."""
        self._code.set_result(code)


class ForkServer:
    """One for the services of a launcher. It starts on the main thread of the process, as any child."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._awaited: deque[asyncio.Future[Forked]] = deque()
        self._living: dict[int, Forked] = {}

    async def start(self, request: Request) -> Process:
        """The service, once it is forked. The server's own errors go to the service's log."""
        async with self._starting:
            process = await self._running(Path(request.log))
        answer: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._awaited.append(answer)
        assert process.stdin is not None
        process.stdin.write(request.line())
        with contextlib.suppress(ConnectionError):  # of a server that has ended: the listener says so
            await process.stdin.drain()
        return await answer

    async def close(self) -> None:
        """End the server, and whatever child is left."""
        self.kill_now()
        if self._listener is not None:
            await self._listener

    def kill_now(self) -> None:
        """SIGKILL to the server, which takes its children along, without waiting."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _running(self, log: Path) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            if self._listener is not None:
                await self._listener
            with log.open("ab") as errors:
                self._process = await asyncio.create_subprocess_exec(
                    *tethered(COMMAND),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
                    env=self._environment, process_group=0,
                )  # fmt: skip
            self._listener = asyncio.create_task(self._listen(self._process), name="fork-server")
        return self._process

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Take the answers of one server until it ends."""
        assert process.stdout is not None
        async for line in process.stdout:
            said = json.loads(line)
            if "forked" in said:
                self._forked(Forked(said["forked"]))
            else:
                self._living.pop(said["ended"]).ended(said["code"])
        code = await process.wait()
        for child in self._living.values():
            child.ended(-signal.SIGKILL)
        self._living.clear()
        while self._awaited:
            never = Forked(process.pid)
            never.ended(code)
            self._answer(never)

    def _forked(self, child: Forked) -> None:
        self._living[child.pid] = child
        if not self._answer(child):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    def _answer(self, child: Forked) -> bool:
        """Whether somebody still waits for it."""
        awaited = self._awaited.popleft()
        if awaited.cancelled():
            return False
        awaited.set_result(child)
        return True
