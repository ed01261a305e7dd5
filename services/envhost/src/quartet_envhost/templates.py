"""Workers as forks of a process that has imported Verifiers once (template.py): the front's side.

1. A forked worker is a child of this process: it is killed by its pid, waited for, and told by its exit code
   or signal. Its template may die.
2. There is one template for each interpreter and environment (variables). It starts with the first worker
   that wants it, and again where it has ended or asks for that; it dies with this process. There are
   MAX_TEMPLATES at most, but for those being asked: the one that was asked longest ago makes room.
3. What cannot be forked is not started here, and the log says why. A template that is unfit is not tried
   again by this front.
4. One that is not ready in `load_timeout_seconds` is killed, and unfit: the next start shall not wait as long
   in vain. One that does not fork within FORK_SECONDS is killed, and unfit where the next does not either.
5. Whoever stops waiting leaves no process: the line of a worker that comes later is closed by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import structlog

from quartet_envhost import processes
from quartet_envhost.adopting import adopting
from quartet_envhost.spawning import TEMPLATE, spawned

log = structlog.get_logger()

# It takes milliseconds, on a machine that has memory and a processor for it.
FORK_SECONDS: Final = 10.0
# What was killed ends at once.
BURY_SECONDS: Final = 1.0
BURY_LOOK_SECONDS: Final = 0.01
# A sentence, and the names of what was left open.
MAX_ANSWER_BYTES: Final = 1 << 16
# The template that was there, and a new one.
TRIES: Final = 2
# In a row without a fork: once may be the machine, and each costs FORK_SECONDS.
MAX_STUCK: Final = 2
# Each has a hundred MiB and more, in use or not. As many environments have workers, by default (config.py).
MAX_TEMPLATES: Final = 16
# Where the ends of children are ignored, nobody has their codes; asyncio says this then.
UNKNOWN_CODE: Final = 255


def possible() -> bool:
    """Whether this system can do it: Linux, from 5.3 on, which the interpreter was built for, too."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class Forked:
    """A worker, as asyncio has a process that it started."""

    def __init__(self, pid: int) -> None:
        """Wait for it from here on. Raises OSError."""
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._collect)

    async def wait(self) -> int:
        """Its exit code, negative for a signal."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _collect(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            self.returncode = UNKNOWN_CODE
        self._ended.set()


class Started(NamedTuple):
    """A worker that was forked."""

    process: Forked
    #: The file of its stack, as it has it.
    stack_fd: int


class Templates:
    """Those of a front."""

    def __init__(self, load_timeout_seconds: float) -> None:
        """Start none."""
        self._seconds = load_timeout_seconds
        self._templates: dict[tuple[str, frozenset[tuple[str, str]]], _Template] = {}

    async def fork(
        self, python: str, environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> Started | None:
        """A worker with its line, the file of its stack and its output; None where it is to be spawned.

        Raises OSError where this process has no descriptors for it.
        """
        key = python, frozenset(environment.items())
        template = self._templates.pop(key, None) or _Template(python, environment, self._seconds)
        self._templates[key] = template  # the last one that was asked
        if not template.running:
            await self._make_room()
        return await template.fork(descriptors)

    async def close(self) -> None:
        """End all templates; their workers go on."""
        await asyncio.gather(*(one.close() for one in self._templates.values()))

    async def _make_room(self) -> None:
        """For one more."""
        running = [one for one in self._templates.values() if one.running]
        idle = [one for one in running if not one.asked]
        for one in idle[: max(0, len(running) - MAX_TEMPLATES + 1)]:
            if not one.asked:  # while another ended
                await one.end()


class _Template:
    def __init__(self, python: str, environment: Mapping[str, str], seconds: float) -> None:
        self._python = python
        self._environment = environment
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._line: socket.socket | None = None
        # Why it is not tried again.
        self._unfit = ""
        # Templates in a row that did not fork.
        self._stuck = 0
        # One request at a time, by tasks that end theirs whoever stops waiting.
        self._lock = asyncio.Lock()
        self._forking: set[asyncio.Task[Started | None]] = set()

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def asked(self) -> bool:
        return bool(self._forking)

    async def fork(self, descriptors: Sequence[int]) -> Started | None:
        with contextlib.ExitStack() as copies:
            own = []
            for one in descriptors:
                own.append(os.dup(one))
                copies.callback(os.close, own[-1])
            task = asyncio.create_task(self._fork(own, copies.pop_all()))
        self._forking.add(task)
        task.add_done_callback(self._forking.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        self._unfit = "the host is stopping"
        if self._process is not None:
            _kill(self._process)
        if self._forking:
            await asyncio.wait(self._forking)
        await self.end()

    async def _fork(self, descriptors: Sequence[int], copies: contextlib.ExitStack) -> Started | None:
        with copies:
            async with self._lock:
                for _ in range(TRIES):
                    if self._unfit or (self._process is None and not await self._start()):
                        break
                    match await self._ask(descriptors):
                        case {"forked": [pid, stack_fd]}:
                            self._stuck = 0
                            return _started(pid, stack_fd)
                        case {"failed": why}:
                            self._warn(why)
                            break
                        case {"stuck": why}:
                            self._stuck += 1
                            (self._refuse if self._stuck == MAX_STUCK else self._warn)(why)
                            await self.end()
                            break
                        case {"unfit": why}:
                            self._refuse(why)
                        case {"renew": why}:
                            log.info("template is started anew", python=self._python, why=why)
                    await self.end()
        return None

    async def _start(self) -> bool:
        """Whether it is ready to be forked."""
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setblocking(False)
        with theirs:
            try:
                self._process = await spawned(self._python, self._environment, theirs.fileno(), TEMPLATE)
            except OSError:  # the spawn of the worker will say why
                await self.end()
                return False
        if self._unfit:  # closed meanwhile
            await self.end()
            return False
        try:
            said = await self._hear(self._seconds)
        except TimeoutError:
            self._refuse(f"their template was not ready within {self._seconds:g} s")
            said = {}
        if said is None:
            code = await self._process.wait()
            if code >= 0:
                self._refuse(f"their template ended with code {code}")
            else:  # that says nothing of the next one
                self._warn(f"their template was killed by signal {-code}")
        elif "unfit" in said:
            self._refuse(said["unfit"])
        elif "ready" in said:
            return True
        await self.end()
        return False

    async def _ask(self, descriptors: Sequence[int]) -> dict[str, Any] | None:
        """What is said to a request; None where it has ended."""
        assert self._line is not None
        with adopting():
            try:
                socket.send_fds(self._line, [b"fork"], descriptors)
                return await self._hear(FORK_SECONDS)
            except ConnectionError:
                return None
            except TimeoutError:
                return {"stuck": f"their template did not fork within {FORK_SECONDS:g} s"}

    async def _hear(self, seconds: float) -> dict[str, Any] | None:
        assert self._line is not None
        async with asyncio.timeout(seconds):
            try:
                said = await asyncio.get_running_loop().sock_recv(self._line, MAX_ANSWER_BYTES)
            except ConnectionError:
                return None
        return json.loads(said) if said else None

    async def end(self) -> None:
        """The next fork starts another."""
        process, line, self._process, self._line = self._process, self._line, None, None
        if process is not None:
            _kill(process)
            await process.wait()
            await _bury(process.pid)
        if line is not None:
            line.close()

    def _refuse(self, why: str) -> None:
        """It is not tried again."""
        self._warn(why)
        self._unfit = why

    def _warn(self, why: str) -> None:
        if not self._unfit:  # nobody asked it to end
            log.warning("workers are spawned, not forked", python=self._python, why=why)


def _started(pid: int, stack_fd: int) -> Started:
    try:
        return Started(Forked(pid), stack_fd)
    except OSError:  # it cannot be watched
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _kill(template: asyncio.subprocess.Process) -> None:
    """With what its imports have started, and what it forked that did not answer."""
    if template.returncode is None:  # else its number may be another's by now
        processes.kill(template.pid)


async def _bury(template: int) -> None:
    """Wait for what it forked and did not wait for: of its group, whose number is theirs until then."""
    with contextlib.suppress(ChildProcessError, TimeoutError):
        async with asyncio.timeout(BURY_SECONDS):
            while True:
                if os.waitpid(-template, os.WNOHANG)[0] == 0:  # noqa: ASYNC222 - it does not wait
                    await asyncio.sleep(BURY_LOOK_SECONDS)
