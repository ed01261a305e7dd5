"""A worker: one process that runs rollouts of one environment, spoken to over the socket it was given.

1. It ends with the front: the kernel kills it when the front dies, and the end of the socket ends it too.
2. Every RUN and every TASKS is answered exactly once, also when it is cancelled, times out or breaks. The
   deadline of a RUN is over rollout and scoring.
3. What the environment prints or logs goes to stderr as it is, with the tracebacks of its failures; so do our
   own lines, as the front's are, in JSON. The socket carries frames alone.
4. A request that says what the release of this interpreter does not know is NOT_IMPLEMENTED: the front may
   have a newer one.
5. A heartbeat leaves every second while the event loop runs, so a wedged loop shows. It says why no turn can
   be sampled, where no replica of inference is in service. With it goes what turns wait for there.
6. From before it imports the environment on, it can be asked for its stack (loading.py, stack.py).
7. A process that a rollout forks and lets come back ends there: it has the socket once more (own_loop.py).
8. With --template it becomes a worker in each fork of itself (template.py), to which all of this applies.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit import logs, own_tasks, tracing
from quartet.kit.channel import ClientSecurity
from quartet.kit.unknown import refuse_unknown
from quartet.local.tether import die_with
from quartet.replicas import Replicas
from quartet.rewards import own_loop
from quartet.v1 import envhost_service_pb2
from quartet.wanted import Wanted, wanted

from quartet_envhost import ending, failures, template
from quartet_envhost.as_told import told
from quartet_envhost.config import STALL_S
from quartet_envhost.frames import MAX_MESSAGE_BYTES, TAKES_WAITS, TRACES, Kind, encode, read_frame
from quartet_envhost.joining import FirstTurns
from quartet_envhost.loading import Loaded, load
from quartet_envhost.sampler import ClientSampler, ReplicaSampler, Sampler
from quartet_envhost.spawning import TEMPLATE
from quartet_envhost.together import time_limit_s

M = TypeVar("M", bound=Message)

HEARTBEAT_S: Final = 1.0
# Cancelled rollouts get this long to clean up before the process ends.
CLOSE_GRACE_S: Final = 5.0
# Of what turns wait for so much is told, so that it fits into a frame: requests, and characters of the id and
# the text of each.
MAX_WAITS: Final = 256
MAX_WAIT_CHARS: Final = 1000


class Worker:
    """The loop between the socket and the environment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speak over an open socket."""
        self._reader = reader
        self._writer = writer
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._loaded: Loaded | None = None
        self._first_turns: FirstTurns | None = None
        # Of the RUN calls under way: their requests, and the weights that those name.
        self._sampled: dict[int, tuple[str, Wanted]] = {}
        # What the front was told last that they wait for.
        self._waits: dict[str, str] = {}
        self._tells_waits = False
        # Of the INTERACT calls under way.
        self._clients: dict[int, ClientSampler] = {}
        # Of calls that are about to come: the places in traces that they are below.
        self._places: dict[int, str] = {}

    async def run(self) -> None:
        """Serve until the front closes the line."""
        self._send(Kind.HELLO, 0, TRACES if tracing.is_on() else b"")
        frame = await read_frame(self._reader)
        if frame is None:
            return
        _, call_id, payload = frame
        settings = json.loads(payload)
        # A front of an earlier release names no level.
        logs.configure("envhost-worker", settings.get("log_level", "info"), others=False)
        self._tells_waits = settings.get(TAKES_WAITS, False)
        _limit_files(settings["max_file_bytes"])
        stall_s = settings.get("stall_seconds", STALL_S)
        async with contextlib.AsyncExitStack() as stack:
            try:
                loaded = self._loaded = await load(settings)
                if addresses := settings["inference_addresses"]:  # none: interact_only
                    security = ClientSecurity.model_validate(settings["security"])
                    replicas = await stack.enter_async_context(Replicas(addresses, security))
                    self._first_turns = FirstTurns(replicas)
                await loaded.serve(stack, stall_s, self._lost)
            except QuartetError as error:
                self._refuse(call_id, error)
                await self._writer.drain()
                return
            beat = asyncio.create_task(self._beat())
            self._send(Kind.OK, call_id, loaded.info)
            try:
                while (frame := await read_frame(self._reader)) is not None:
                    self._take(*frame)
            finally:
                beat.cancel()
                await self._end_calls()

    def _take(self, kind: Kind, call_id: int, payload: bytes) -> None:
        if kind is Kind.CANCEL:
            if call_id in self._calls:
                self._calls[call_id].cancel()
            return
        if kind is Kind.ANSWER:
            if call_id in self._clients:
                self._clients[call_id].take(envhost_service_pb2.ModelAnswer.FromString(payload))
            return
        if kind is Kind.TRACE:
            self._places[call_id] = payload.decode()
            return
        work = {Kind.TASKS: self._tasks, Kind.RUN: self._run, Kind.INTERACT: self._interact}[kind]
        task = asyncio.create_task(self._answer(call_id, work, payload))
        self._calls[call_id] = task
        task.add_done_callback(lambda _: self._calls.pop(call_id, None))

    async def _answer(self, call_id: int, work: Callable[[int, bytes], Any], payload: bytes) -> None:
        tracing.go_on(self._places.pop(call_id, ""))
        try:
            answer: Message = await work(call_id, payload)
        except QuartetError as error:
            self._refuse(call_id, error)
        except DecodeError as error:
            self._refuse(call_id, QuartetError("INVALID_REQUEST", str(error), field="payload"))
        else:
            self._send(Kind.OK, call_id, answer.SerializeToString())

    async def _tasks(self, _: int, payload: bytes) -> Message:
        request, loaded = _asked(envhost_service_pb2.GetTasksRequest, payload), self._ready
        try:
            response = await loaded.environment.tasks(request)
        except QuartetError:
            raise
        except own_tasks.CONTROL:
            raise
        # The environment's own code, as when it is loaded: an infinite taskset is read only now.
        except BaseException as error:
            text = f"tasks of {loaded.env_id!r} cannot be read: {loaded.own.text_of(error)}"
            raise QuartetError("ENVIRONMENT_UNAVAILABLE", text, env_id=loaded.env_id) from error
        if response.ByteSize() > MAX_MESSAGE_BYTES:
            text = f"{len(response.tasks)} tasks do not fit into 4 MiB; ask for fewer at a time"
            if len(response.tasks) == 1:
                size = f"{len(response.tasks[0].data_json):,}"
                text = (
                    f"example {request.start} of {loaded.env_id!r} has {size} characters, prompt and all; "
                    "a message has room for 4 MiB: make it smaller, or leave it out"
                )
            raise QuartetError(
                "INVALID_REQUEST",
                text,
                field="count",
                value=request.count,
            )
        return response

    async def _run(self, call_id: int, payload: bytes) -> Message:
        assert self._first_turns is not None
        request = _asked(envhost_service_pb2.RunRolloutsRequest, payload)
        self._sampled[call_id] = request.request_id, wanted(request)
        try:
            with self._first_turns.member(request.request_id, len(request.members)) as first:
                return await self._rollout(request, ReplicaSampler(self._first_turns.replicas, first))
        finally:
            del self._sampled[call_id]

    async def _interact(self, call_id: int, payload: bytes) -> Message:
        request = _asked(envhost_service_pb2.RunRolloutsRequest, payload)

        def ask(question: bytes) -> None:
            self._send(Kind.QUESTION, call_id, question)

        self._clients[call_id] = client = ClientSampler(request.members[0], ask)
        try:
            return await self._rollout(request, client)
        finally:
            del self._clients[call_id]

    async def _rollout(self, request: envhost_service_pb2.RunRolloutsRequest, sampler: Sampler) -> Message:
        member, loaded = request.members[0], self._ready
        limit_s = time_limit_s(request)
        try:
            async with asyncio.timeout(limit_s) as clock:
                rollout = await loaded.environment.run(sampler, request)
        except QuartetError:
            raise
        # Verifiers records what environments raise; what still escapes broke around them. Also what would
        # end the process: one environment's sys.exit() is no reason to lose the rollouts beside it.
        except BaseException as error:
            if isinstance(error, GeneratorExit) and own_tasks.from_outside(error):
                raise
            if clock.expired():
                text = (
                    f"the rollout and its scoring were not done after {limit_s:g} s; a larger "
                    "timeout_seconds (of its environment) gives them more"
                )
                return failures.failed(member, failures.TIMEOUT, text, retryable=False)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # Cancelled by the front, which no longer waits; answered so that every call ends.
                return failures.failed(member, failures.CANCELLED, "cancelled", retryable=False)
            return failures.failed(member, failures.ENVIRONMENT, loaded.own.text_of(error), retryable=False)
        return told(rollout)

    @property
    def _ready(self) -> Loaded:
        """The environment; calls come only once it is loaded."""
        assert self._loaded is not None
        return self._loaded

    def _send(self, kind: Kind, call_id: int, payload: bytes = b"") -> None:
        self._writer.write(encode(kind, call_id, payload))

    def _lost(self, why: str) -> None:
        self._send(Kind.LOST, 0, why.encode())

    def _refuse(self, call_id: int, error: QuartetError) -> None:
        content = {"reason": error.reason, "message": error.message, "metadata": error.metadata}
        self._send(Kind.ERROR, call_id, json.dumps(content).encode())

    async def _beat(self) -> None:
        while True:
            turns = self._first_turns
            held_up = turns.replicas.out_of_reach if turns is not None else ""
            self._send(Kind.HEARTBEAT, 0, held_up.encode())
            if turns is not None and self._tells_waits:
                self._tell_waits(turns.replicas.waiting)
            await asyncio.sleep(HEARTBEAT_S)

    def _tell_waits(self, waiting: dict[Wanted, str]) -> None:
        found = {
            request_id: waiting[which][:MAX_WAIT_CHARS]
            for request_id, which in self._sampled.values()
            if which in waiting and len(request_id) <= MAX_WAIT_CHARS
        }
        waits = dict(itertools.islice(found.items(), MAX_WAITS))
        if waits != self._waits:
            self._waits = waits
            self._send(Kind.WAITS, 0, json.dumps(waits).encode())

    async def _end_calls(self) -> None:
        calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls, timeout=CLOSE_GRACE_S)


def _asked(kind: type[M], payload: bytes) -> M:
    """A request of the front. Raises NOT_IMPLEMENTED."""
    request = kind.FromString(payload)
    refuse_unknown(request, payload, f"the worker of {sys.executable}")
    return request


def _have_home() -> None:
    """A user without a name and without HOME has no home. Verifiers means to use the folder of temporary
    files then, and in places fails to import."""
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = tempfile.gettempdir()


def _limit_files(limit: int) -> None:
    """A write beyond is an OSError where it is made: Python ignores the signal that comes with it."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))


async def _serve(fd: int) -> None:
    line = socket.socket(fileno=fd)
    line.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=line)
    # Environments may install handlers of their own; the front alone decides when a worker ends.
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    loop.set_task_factory(own_loop.made)
    try:
        await Worker(reader, writer).run()
    finally:
        with contextlib.suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()


def main() -> None:
    """Run the worker on the socket and for the parent that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument(TEMPLATE, dest="template", action="store_true")
    arguments = parser.parse_args()
    fd: int | None = arguments.fd
    die_with(arguments.parent)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    _have_home()
    if arguments.template:
        fd = template.serve(arguments.fd, arguments.parent)
    if fd is None:
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(tracing.exporting("envhost-worker"))
        except ConfigError as error:  # of this interpreter; that is no reason to run no rollouts
            print(f"no spans of worker {os.getpid()}: {error}", file=sys.stderr)
        asyncio.run(_serve(fd))
    ending.end()


if __name__ == "__main__":
    main()
