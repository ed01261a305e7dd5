"""One worker process as the front sees it.

1. Every call ends: with its answer, or with WorkerDied when the process ends or is stopped.
2. The process and what it started die with `kill`, and what it leaves where it ends; it dies by itself when
   the front dies.
3. Silence is seen: `silent_seconds` counts from the last frame.
4. A process that hangs is asked for its stack before it is stopped (stack.py): what its calls end with names
   the line of the environment's own code, and the log has all of it. That delays the end by HUNG_S and the
   stack's ANSWER_S at most.
5. What it leaves in its folder (own_folder.py) is removed once it and what it started have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import structlog
from google.protobuf.message import DecodeError
from quartet.kit import tracing
from quartet.kit.proxies import past_proxies
from quartet.v1 import envhost_service_pb2

from quartet_envhost import processes
from quartet_envhost.frames import TAKES_WAITS, TRACES, Kind, encode, read_frame, refusal
from quartet_envhost.own_folder import folder_of
from quartet_envhost.spawning import STDERR, spawned
from quartet_envhost.stack import Process, StackFile
from quartet_envhost.templates import Forked, Templates

log = structlog.get_logger()

# A worker that was asked to end by closing its line has so long before it is killed: its own grace and the
# teardown.
STOP_GRACE_S: Final = 8.0

# A worker that closed its line itself is ending; it has so long to write its traceback.
EXIT_GRACE_S: Final = 1.0

# Two heartbeats: a loop that turns is heard within.
HUNG_S: Final = 2.0

_OF_ROLLOUTS: Final = frozenset({Kind.RUN, Kind.INTERACT})


# Answers a question of a worker.
Ask = Callable[[envhost_service_pb2.ModelQuestion], Awaitable[envhost_service_pb2.ModelAnswer]]


class WorkerDied(Exception):
    """The process ended, or was stopped, before it answered. str() says how."""


class WorkerProcess:
    """A running worker. Made by `spawn`."""

    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stack: StackFile,
        stack_fd: int,
        folder: Path | None,
    ) -> None:
        """Take over a process, its line, the file of its stack, which the process has as `stack_fd`, and its
        folder."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._stack = stack
        self._stack_fd = stack_fd
        self._folder = folder
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        # Who answers the questions of a call, and the questions that are open.
        self._asked: dict[int, Ask] = {}
        self._questions: dict[int, set[asyncio.Task[None]]] = {}
        self._frames = 0
        self._last_frame = time.monotonic()
        self._stopped_because = ""
        self._hangs: asyncio.Task[str] | None = None
        self.spoke = asyncio.Event()
        self._takes_traces = False
        # Why no turn can be sampled, as it said last.
        self.held_up = ""
        # What turns wait for, by their requests.
        self.waits: dict[str, str] = {}
        self._removal: asyncio.Task[None] | None = None
        self._listener = asyncio.create_task(self._listen())
        self._burial = asyncio.create_task(self._end_what_it_left())

    @classmethod
    async def spawn(
        cls, python: str, env: Mapping[str, str], templates: Templates | None = None
    ) -> WorkerProcess:
        """Start a worker on an interpreter, as a fork of one of the templates where that can be had.

        Raises WorkerDied.
        """
        environment = {**os.environ, **env}
        environment |= past_proxies(environment)  # its tools are servers on this machine
        with contextlib.ExitStack() as undone:
            try:
                stack = undone.enter_context(contextlib.closing(StackFile()))
                ours, theirs = socket.socketpair()
            except OSError as error:
                raise WorkerDied(f"no line to a worker can be made: {error.strerror}") from error
            undone.enter_context(ours)
            with theirs:
                process, stack_fd = await _started(python, environment, theirs.fileno(), stack.fd, templates)
            folder = None
            with contextlib.suppress(OSError):  # it has ended already
                folder = folder_of(process.pid, environment)
            ours.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=ours)
            undone.pop_all()
        return cls(process, reader, writer, stack, stack_fd, folder)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def forked(self) -> bool:
        """Whether it is a fork of a template."""
        return isinstance(self._process, Forked)

    @property
    def open_calls(self) -> int:
        """Calls that are not answered."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return not self._listener.done() and not self._stopped_because

    @property
    def silent_seconds(self) -> float:
        """Time since the worker last said anything."""
        return time.monotonic() - self._last_frame

    def unheard(self, seconds: float) -> None:
        """For so long nobody listened: it does not count as silence."""
        self._last_frame = min(time.monotonic(), self._last_frame + seconds)

    async def open(self, settings: dict[str, Any]) -> bytes:
        """Load the environment. Raises QuartetError where it is refused."""
        settings = {**settings, "stack_fd": self._stack_fd, TAKES_WAITS: True}
        return await self.call(Kind.OPEN, json.dumps(settings).encode())

    async def call(self, kind: Kind, payload: bytes, ask: Ask | None = None) -> bytes:
        """The answer of one call. Raises QuartetError or WorkerDied; cancelling it reaches the worker.

        `ask` answers the questions of an INTERACT.
        """
        if not self.alive:
            raise WorkerDied(self._stopped_because or "the worker has ended")
        call_id = next(self._ids)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        if ask is not None:
            self._asked[call_id] = ask
        try:
            if self._takes_traces and kind in _OF_ROLLOUTS and (place := tracing.carried()):
                self._writer.write(encode(Kind.TRACE, call_id, place.encode()))
            self._writer.write(encode(kind, call_id, payload))
            return await future
        except asyncio.CancelledError:
            if self.alive:
                self._writer.write(encode(Kind.CANCEL, call_id))
            raise
        finally:
            self._waiting.pop(call_id, None)
            self._asked.pop(call_id, None)
            for question in self._questions.pop(call_id, ()):
                question.cancel()

    def kill(self, why: str) -> None:
        """Stop the process at once; its calls end with WorkerDied(why)."""
        self._stopped_because = self._stopped_because or why
        processes.kill(self._process.pid)

    async def kill_hung(self, why: str) -> str:
        """`kill` a process that does not answer, once it has told where it hangs.

        The place is in front of `why` then, and is the result for other messages to begin with, such as
        "my_env/rewards.py:12 in exact: "; empty where there is none, and for a loop that turns all the same.
        """
        if self._hangs is None:
            if not self.alive:
                self.kill(why)
                return ""
            self._stopped_because = why  # from here on it takes no calls
            self._hangs = asyncio.create_task(self._look_and_kill(why))
        return await asyncio.shield(self._hangs)

    async def wait(self) -> str:
        """Wait for the end; how it ended."""
        await asyncio.wait([self._listener])
        return self._how_it_ended()

    async def stop(self) -> None:
        """End the worker by closing its line, or by force after the grace."""
        self._stopped_because = self._stopped_because or "the host is stopping"
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await self._process.wait()
        self.kill("the host is stopping")
        await self._process.wait()
        await asyncio.wait([self._listener])
        if self._removal is not None:
            await asyncio.wait([self._removal])

    async def _look_and_kill(self, why: str) -> str:
        try:
            frames = self._frames
            await asyncio.sleep(max(0.0, HUNG_S - self.silent_seconds))
            if self._frames > frames or self._process.returncode is not None:
                return ""
            stack = await self._stack.ask(self._process)
            if stack is None:
                return ""
            log.warning("worker hangs", pid=self.pid, place=stack.place, stack=stack.text)
            place = f"{stack.place}: " if stack.place else ""
            self._stopped_because = f"{place}{why}"
            return place
        finally:
            self.kill(why)

    async def _end_what_it_left(self) -> None:
        """Also its line, which what it forked has, too."""
        await self._process.wait()
        processes.kill(self._process.pid)

    async def _listen(self) -> None:
        try:
            while (frame := await read_frame(self._reader)) is not None:
                self._take(*frame)
        except (ValueError, DecodeError) as error:  # A frame that no worker of ours writes.
            self.kill(f"the worker broke its line: {error}")
        # The line is closed: nothing useful can come from this process any more, but it may be saying why, or
        # be taking down what its rollouts have started.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S if self._stopped_because else EXIT_GRACE_S):
                await self._process.wait()
        if self._process.returncode is None:
            processes.kill(self._process.pid)
        await self._burial
        self._stack.close()
        self._stopped_because = self._how_it_ended()  # from here on it takes no calls
        died = WorkerDied(self._stopped_because)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(died)
        self._writer.close()
        if self._folder is not None:  # beside: nobody waits for a disk to hear that the worker has ended
            removal = asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            self._removal = asyncio.create_task(removal)

    def _take(self, kind: Kind, call_id: int, payload: bytes) -> None:
        self._frames += 1
        self._last_frame = time.monotonic()
        self.spoke.set()
        if kind is Kind.HEARTBEAT:
            self.held_up = payload.decode()
            return
        if kind is Kind.WAITS:
            self.waits = json.loads(payload)
            return
        if kind is Kind.HELLO:
            self._takes_traces = payload == TRACES
            return
        if kind is Kind.LOST:
            self.kill(f"worker {self.pid} was stopped: {payload.decode()}")
            return
        if kind is Kind.QUESTION:
            self._put_question(call_id, payload)
            return
        future = self._waiting.get(call_id)
        if future is None or future.done():  # the answer of a call that was cancelled
            return
        if kind is Kind.OK:
            future.set_result(payload)
        elif kind is Kind.ERROR:
            future.set_exception(refusal(payload))

    def _put_question(self, call_id: int, payload: bytes) -> None:
        if call_id not in self._asked:  # of a call that was cancelled
            return
        question = envhost_service_pb2.ModelQuestion.FromString(payload)
        open_ = self._questions.setdefault(call_id, set())
        task = asyncio.create_task(self._answer(call_id, self._asked[call_id], question))
        open_.add(task)
        task.add_done_callback(open_.discard)

    async def _answer(self, call_id: int, ask: Ask, question: envhost_service_pb2.ModelQuestion) -> None:
        answer = await ask(question)
        if self.alive:
            self._writer.write(encode(Kind.ANSWER, call_id, answer.SerializeToString()))

    def _how_it_ended(self) -> str:
        if self._stopped_because:
            return self._stopped_because
        code = self._process.returncode
        if code is not None and code < 0:
            return f"worker {self.pid} was killed by {_name(-code)}"
        return f"worker {self.pid} exited with code {code}"


async def _started(
    python: str, environment: Mapping[str, str], line: int, stack_fd: int, templates: Templates | None
) -> tuple[Process, int]:
    """A fork where that can be had, else a process of its own; with the file of its stack, as it has it.

    Raises WorkerDied.
    """
    if templates is not None:
        try:
            forked = await templates.fork(python, environment, (line, stack_fd, STDERR))
        except OSError as error:
            raise WorkerDied(f"no line to a worker can be made: {error.strerror}") from error
        if forked is not None:
            return forked
    try:
        process = await spawned(python, environment, line, more=(stack_fd,))
    except OSError as error:
        raise WorkerDied(f"interpreter {python} does not start: {error.strerror}") from error
    return process, stack_fd


def _name(number: int) -> str:
    """Of a signal; most of the real-time ones have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
