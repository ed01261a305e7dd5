"""A frozen service is named; a busy or refusing one is not."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from loopback import LOOPBACK
from quartet.cli import silence
from quartet.cli.display import Plain
from quartet.cli.progress import Progress
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.local.supervisor import State, Status
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.orchestrator_service_pb2_grpc import (
    OrchestratorServiceServicer,
    add_OrchestratorServiceServicer_to_server,
)


async def said(out: io.StringIO, what: str) -> None:
    while what not in out.getvalue():  # noqa: ASYNC110 - a StringIO wakes nobody
        await asyncio.sleep(0.02)


async def test_only_the_frozen_service_is_named_and_again_when_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silence, "SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(silence, "ANSWER_SECONDS", 2.0)
    running = await start([], ServerConfig(), Health())
    # A stopped process: the kernel accepts the connection, nobody reads from it.
    frozen = socket.create_server(("127.0.0.1", 0))
    closed = socket.create_server((LOOPBACK, 0))
    gone = f"{LOOPBACK}:{closed.getsockname()[1]}"
    closed.close()
    trainer = Status("trainer", running.address, State.UP)
    inference = Status("inference", f"127.0.0.1:{frozen.getsockname()[1]}", State.UP, pid=7)
    envhost = Status("envhost", gone, State.UP)
    starting = Status("orchestrator", inference.address, State.STARTING, pid=8)
    supervisor = SimpleNamespace(statuses=[trainer, inference, envhost, starting])
    out = io.StringIO()
    task = asyncio.create_task(silence.name_the_silent(supervisor, Progress(), Plain(out)))
    try:
        async with asyncio.timeout(60):
            await said(out, "does not answer")
            inference.address = running.address
            await said(out, "inference answers again")
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        frozen.close()
        await running.stop(0)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and "inference (process 7) does not answer" in lines[0]


async def test_a_run_in_which_something_happens_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, turns = Progress(), 0

    async def something_happens(seconds: float) -> None:
        nonlocal turns
        turns += 1
        progress.last_event += 1
        await asyncio.sleep(0)

    async def asked(address: str) -> bool:
        raise AssertionError("nobody is asked while events come")

    monkeypatch.setattr(silence, "asyncio", SimpleNamespace(sleep=something_happens, gather=asyncio.gather))
    monkeypatch.setattr(silence, "_answers", asked)
    supervisor = SimpleNamespace(statuses=[Status("trainer", "127.0.0.1:1", State.UP)])
    task = asyncio.create_task(silence.name_the_silent(supervisor, progress, Plain(io.StringIO())))
    while turns < 30 and not task.done():  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()


async def test_a_service_that_takes_long_to_start_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "SILENCE_SECONDS", 0.02)
    monkeypatch.setattr(silence, "SLOW_SECONDS", 0.1)
    inference = Status("inference-2", "127.0.0.1:1", State.STARTING, pid=7)
    out = io.StringIO()
    supervisor = SimpleNamespace(statuses=[inference])
    task = asyncio.create_task(silence.name_the_silent(supervisor, Progress(), Plain(out)))
    try:
        async with asyncio.timeout(60):
            await said(out, "inference-2 is still starting; logs/inference-2.log")
        await asyncio.sleep(0.3)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert len(out.getvalue().splitlines()) == 1


class _Standing(OrchestratorServiceServicer):
    """An orchestrator of one run."""

    async def GetRunStatus(self, request: Any, context: Any) -> pb.GetRunStatusResponse:
        doing = "waiting for rollouts of step 7 for 61 s" if request.run_id == "mine" else ""
        return pb.GetRunStatusResponse(run=pb.Run(run_id=request.run_id, doing=doing))


async def test_a_run_that_stands_still_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """silence.py 4: at 60 s, 120 s and 240 s, and at 60 s again after something happened."""
    health = Health()
    service = Service(
        "quartet.v1.OrchestratorService", add_OrchestratorServiceServicer_to_server, _Standing()
    )
    running = await start([service], ServerConfig(), health)
    progress, waits = Progress(run=pb.Run(run_id="mine")), []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 30:
            progress.last_event += 1
        if len(waits) == 37:
            await asyncio.Event().wait()

    monkeypatch.setattr(silence, "asyncio", SimpleNamespace(sleep=sleep))
    supervisor = SimpleNamespace(statuses=[Status("orchestrator", running.address, State.UP)])
    out = io.StringIO()
    told_at: list[int] = []
    screen = Plain(out)
    monkeypatch.setattr(screen, "say", lambda line: told_at.append(len(waits)) or out.write(f"{line}\n"))
    task = asyncio.create_task(silence.tell_standstill(supervisor, progress, screen))
    try:
        async with asyncio.timeout(60):
            while len(waits) < 37:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await running.stop(0)
    assert told_at == [6, 12, 24, 36]
    said = "still waiting for rollouts of step 7 for 61 s; logs/ has what the services say\n"
    assert out.getvalue() == 4 * said
