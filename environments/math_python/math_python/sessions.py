"""Python sessions from outside: begun when first used, ended in every case.

1. One session for each key. Calls of one session run one after the other; sessions do not wait for each
   other.
2. A call that takes longer than its time, or writes more than a frame may have, ends its session; the next
   call begins a new one, and says so.
3. At most `max_sessions` live; one more ends the one that has been idle longest, or waits in the order of
   asking while none is idle. A session idle for `idle_seconds` is ended too, so that a rollout that was
   cancelled leaves nothing behind.
4. The death of this process ends them all. The death of the nursery ends them too; the next call starts a
   new one.
5. MAX_RUNNING calls run at once, further ones wait, their own time not running. Sessions and what they have
   started are MAX_PROCESSES, fewer than stop the whole worker (its max_processes) with the rollouts of all:
   of more the session that has started most is ended. Seen every LOOK_SECONDS, and only what the main thread
   of a session has started itself: copies that copy themselves (`while True: os.fork()`) pass that look, and
   the worker's own limit meets them.
6. The nursery is asked one thing at a time, and its answer is awaited also when nobody wants it any more: a
   session that was cancelled while it began is ended, and no other gets its handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

NURSERY = Path(__file__).with_name("nursery.py")
START_SECONDS = 60.0  # numpy and sympy are imported once
MAX_CODE_BYTES = 1 << 20
REAP_SECONDS = 5.0
MAX_RUNNING = max(64, os.cpu_count() or 1)  # one on each core, and 64 anyway: some wait for something
MAX_PROCESSES = 480  # of a worker's 512, which has some of its own
LOOK_SECONDS = 0.2  # a copy takes a millisecond or two, and who looks at the worker looks every second
NEW_SESSION = "(a new session: earlier names are gone)\n"
MAX_LOST = 4096  # rollouts that lost a session and may not have come back; past it a note may be missing


class Limits(BaseModel):
    """What a session may use."""

    packages: list[str] = []
    call_seconds: float = Field(default=10.0, gt=0)
    cpu_seconds: int = Field(default=120, ge=1)
    memory_bytes: int = Field(default=2 << 30, ge=64 << 20)
    output_chars: int = Field(default=8192, ge=1)
    max_sessions: int = Field(default=384, ge=1)
    idle_seconds: float = Field(default=300.0, gt=0)
    isolate: bool = True
    """Use namespaces where the kernel gives them."""


@dataclass(frozen=True)
class Answer:
    """What a call printed."""

    output: str
    error: bool


@dataclass
class _Session:
    pidfd: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int
    used: float = field(default_factory=time.monotonic)
    busy: bool = False

    def children(self) -> int:
        """Processes that its code has started and left running; 0 where it has ended."""
        try:
            return len(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_bytes().split())
        except OSError:
            return 0

    def end(self) -> None:
        _kill(self.pidfd)
        self.writer.close()


def _pid(pidfd: int) -> int:
    """Of the process behind a handle, as this process sees it; below 1 where it has ended."""
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


def _kill(pidfd: int) -> None:
    """End the process behind a handle with its group, and close the handle."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)  # its number is its own until it is killed
        with contextlib.suppress(ProcessLookupError):  # it may have no group yet
            if (pid := _pid(pidfd)) > 1:
                os.killpg(pid, signal.SIGKILL)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


class Sessions:
    """All sessions of a tool server."""

    def __init__(self, limits: Limits) -> None:
        """Nothing starts before `open`."""
        self._limits = limits
        self._live: dict[str, _Session] = {}
        # A lock is there for as long as a call has it or waits for it: a cancelled rollout leaves none.
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._lost: set[str] = set()
        self._forking = asyncio.Lock()
        self._running = asyncio.Semaphore(MAX_RUNNING)
        # Sessions that begin have a place already; whoever finds none waits at the door, one at a time.
        self._beginning: set[asyncio.Task[_Session]] = set()
        self._door = asyncio.Lock()
        self._changed = asyncio.Event()
        self.isolated = False

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Sessions]:
        """Run the nursery and the reaper for as long as the block lasts."""
        with contextlib.ExitStack() as self._nursery:
            await self._grow()
            keepers = [asyncio.create_task(self._reap()), asyncio.create_task(self._look_at_children())]
            try:
                yield self
            finally:
                for keeper in keepers:
                    keeper.cancel()
                for key in list(self._live):
                    self.end(key)
                await asyncio.gather(*self._beginning, return_exceptions=True)

    async def _grow(self) -> None:
        """A new nursery; the old one ends, if there is one. Raises RuntimeError."""
        self._nursery.close()
        process = self._start(self._nursery)
        said = await asyncio.to_thread(self._control.recv, 4096)
        if not said:
            raise RuntimeError(f"the parent of the Python sessions ended with {process.wait()}")
        self.isolated = json.loads(said)["isolated"]

    def _start(self, opened: contextlib.ExitStack) -> subprocess.Popen[bytes]:
        """The nursery, which ends with `opened`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = opened.enter_context(ours)
        ours.settimeout(START_SECONDS)
        settings = self._limits.model_dump(
            include={"isolate", "packages", "cpu_seconds", "memory_bytes", "output_chars"}
        )
        arguments = [str(NURSERY), str(theirs.fileno()), json.dumps(settings), str(os.getpid())]
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", *arguments],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        opened.callback(process.wait)
        opened.callback(process.kill)
        return process

    async def run(self, key: str, code: str) -> Answer:
        """Run code in the session of that key."""
        request = json.dumps({"code": code}).encode()
        if len(request) > MAX_CODE_BYTES:
            return Answer(f"error: the code is longer than {MAX_CODE_BYTES} bytes", True)
        async with self._locks.setdefault(key, asyncio.Lock()):
            session = self._live.get(key) or await self._begin(key)
            session.busy = True
            try:
                async with self._running, asyncio.timeout(self._limits.call_seconds):
                    answer = await self._exchange(session, request)
            except TimeoutError:
                why = f"stopped after {self._limits.call_seconds:g} s"
            except (asyncio.IncompleteReadError, ConnectionError):
                why = "ended: it used more CPU time, memory or processes than it may, or exited"
            except ValueError as error:
                why = str(error)
            except asyncio.CancelledError:
                self._lose(key)  # what it would have answered must not answer the next call
                raise
            else:
                session.busy, session.used = False, time.monotonic()
                self._changed.set()
                note = NEW_SESSION if key in self._lost else ""
                self._lost.discard(key)
                # Code may print half a surrogate pair, which no message can carry.
                output = answer["output"].encode("utf-8", "replace").decode()
                return Answer(note + output, answer["error"])
            self._lose(key)
            return Answer(f"error: Python was {why}", True)

    async def _exchange(self, session: _Session, request: bytes) -> dict[str, Any]:
        session.writer.write(struct.pack("!I", len(request)) + request)
        await session.writer.drain()
        (size,) = struct.unpack("!I", await session.reader.readexactly(4))
        # JSON escapes may make six characters of one.
        if size > 6 * self._limits.output_chars + 4096:
            raise ValueError("stopped: its answer was not one")
        answer = json.loads(await session.reader.readexactly(size))
        if not isinstance(answer, dict) or not isinstance(answer.get("output"), str):
            raise ValueError("stopped: its answer was not one")
        return answer

    async def _begin(self, key: str) -> _Session:
        async with self._door:
            while len(self._live) + len(self._beginning) >= self._limits.max_sessions:
                idle = [(one.used, name) for name, one in self._live.items() if not one.busy]
                if idle:
                    self._lose(min(idle)[1])
                else:
                    self._changed.clear()
                    await self._changed.wait()
            beginning = asyncio.create_task(self._new())
            self._beginning.add(beginning)
        try:
            session = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(self._end_unwanted)
            raise
        except BaseException:
            self._leave(beginning)
            raise
        self._live[key] = session
        self._leave(beginning)
        return session

    def _leave(self, beginning: asyncio.Task[_Session]) -> None:
        self._beginning.discard(beginning)
        self._changed.set()

    def _end_unwanted(self, beginning: asyncio.Task[_Session]) -> None:
        if not beginning.cancelled() and beginning.exception() is None:
            beginning.result().end()
        self._leave(beginning)

    async def _new(self) -> _Session:
        """A session, from the nursery or from a new one. Raises OSError and RuntimeError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                async with self._forking:
                    try:
                        pidfd = await asyncio.to_thread(self._fork, theirs)
                    except OSError:
                        await self._grow()
                        pidfd = await asyncio.to_thread(self._fork, theirs)
            try:
                return _Session(pidfd, *await asyncio.open_connection(sock=ours), _pid(pidfd))
            except BaseException:
                _kill(pidfd)
                raise
        except BaseException:
            ours.close()
            raise

    def _fork(self, theirs: socket.socket) -> int:
        socket.send_fds(self._control, [b"1"], [theirs.fileno()])
        _, handles, _, _ = socket.recv_fds(self._control, 16, 1)
        if not handles:
            raise ConnectionResetError("the parent of the Python sessions is gone")
        return handles[0]

    def end(self, key: str) -> None:
        """End a session with everything it started; a key without one is no error."""
        self._lost.discard(key)
        session = self._live.pop(key, None)
        if session is not None:
            session.end()
            self._changed.set()

    def _lose(self, key: str) -> None:
        """End a session whose rollout may come back to it."""
        self.end(key)
        if len(self._lost) >= MAX_LOST:
            self._lost.clear()
        self._lost.add(key)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(REAP_SECONDS, self._limits.idle_seconds))
            oldest = time.monotonic() - self._limits.idle_seconds
            for key, session in list(self._live.items()):
                if not session.busy and session.used < oldest:
                    self._lose(key)

    async def _look_at_children(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            children = {key: session.children() for key, session in self._live.items()}
            while any(children.values()) and len(children) + sum(children.values()) > MAX_PROCESSES:
                most = max(children, key=children.__getitem__)
                del children[most]
                self._lose(most)
