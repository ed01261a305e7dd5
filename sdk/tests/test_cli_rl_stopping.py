"""A run of `quartet rl` that is told to stop: by whom, how long it takes, and what ends with it."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from planned_runs import planned
from quartet.cli import asked, drive, exits, rl
from quartet.cli.__main__ import build_parser
from quartet.cli.asked import Interrupts
from quartet.cli.display import Plain
from quartet.cli.drive import Outcome
from quartet.cli.outputs import Outputs
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.local.supervisor import Status
from quartet.run.config import RunConfig
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import orchestrator_service_pb2_grpc as rpc


async def test_a_stop_before_the_run_was_taken_begins_nothing() -> None:
    display = Plain(io.StringIO())
    interrupts = Interrupts(Mock(), display)
    work: asyncio.Task[Any] = asyncio.create_task(asyncio.sleep(60))
    interrupts.asked.set()
    await drive._stop_when_asked(interrupts, Mock(statuses=[]), "run", work, display, asyncio.Event())
    with pytest.raises(asyncio.CancelledError):
        await work


class Stopping(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
    """Says that it stops a run."""

    async def StopRun(self, request: pb.StopRunRequest, context: object) -> pb.StopRunResponse:
        return pb.StopRunResponse()


@pytest.mark.parametrize(("stop_s", "in_order"), [(0.05, False), (30.0, True), (None, True)])
async def test_the_step_under_way_has_as_long_as_it_is_given(stop_s: float | None, in_order: bool) -> None:
    add = rpc.add_OrchestratorServiceServicer_to_server
    offered = Service("quartet.v1.OrchestratorService", add, Stopping())
    server = await start([offered], ServerConfig(), Health())
    services = Mock(statuses=[Status("orchestrator", server.address)])
    said, taken = io.StringIO(), asyncio.Event()
    display = Plain(said)
    interrupts = Interrupts(Mock(), display)
    work: asyncio.Task[Any] = asyncio.create_task(asyncio.sleep(1 if in_order else 60))
    interrupts.asked.set()
    taken.set()
    await drive._stop_when_asked(interrupts, services, "run", work, display, taken, stop_s)
    await asyncio.wait({work})
    assert work.cancelled() is not in_order
    assert ("; what was not saved is done again by what goes on" in said.getvalue()) is not in_order
    await server.stop(0)


def test_a_job_of_slurm_says_how_long_a_stop_in_order_may_take(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    async def drive(*told: object) -> Outcome:
        given.extend(told[-2:])
        return Outcome(pb.Run(), {}, interrupted=True)

    monkeypatch.setattr(rl, "drive", drive)
    rl.launch(planned(config, tmp_path / "run"), Plain, time.monotonic(), stop_s=1760.0)
    options, _ = build_parser().parse_known_args(["rl", "--stop-seconds", "1760"])
    assert given == [options.stop_seconds, ["reverse-text"]] and given[0] == 1760.0
    given.clear()
    rl.launch(planned(config, tmp_path / "other"), Plain, time.monotonic())
    options, _ = build_parser().parse_known_args(["rl"])
    assert given == [options.stop_seconds, ["reverse-text"]] and given[0] is None, "a step may take an hour"


async def test_a_terminal_that_is_closed_stops_a_run_once_however_often_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """drive.py 2."""
    killed = asyncio.Event()
    kill = Mock(side_effect=killed.set)
    interrupts = Interrupts(kill, Plain(io.StringIO()))
    monkeypatch.setattr(os, "_exit", Mock())
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with drive.by_signals(interrupts):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.wait_for(interrupts.asked.wait(), 30)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(killed.wait(), 30)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert kill.call_count == 1


async def test_one_wish_that_is_heard_twice_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """drive.py 2: `timeout` signals the command, and then the group that the command is in."""
    killed = asyncio.Event()
    kill = Mock(side_effect=killed.set)
    interrupts = Interrupts(kill, Plain(io.StringIO()))
    monkeypatch.setattr(os, "_exit", Mock())
    now_s = 100.0
    monkeypatch.setattr(asked, "monotonic", lambda: now_s)
    with drive.by_signals(interrupts):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(interrupts.asked.wait(), 30)
        now_s += 0.9 * asked.ONE_WISH_SECONDS
        interrupts.signalled()
        assert not kill.called
        now_s += 0.2 * asked.ONE_WISH_SECONDS
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(killed.wait(), 30)
    assert kill.call_count == 1


def test_who_asks_twice_is_obeyed_also_where_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """drive.py 2: the disk under stderr is full, or its terminal gone."""
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True))
    monkeypatch.setattr(os, "_exit", ended := Mock())
    interrupts = Interrupts(Mock(), Plain(io.StringIO()))
    interrupts.asked.set()
    interrupts.signalled()
    ended.assert_called_once_with(exits.INTERRUPTED)


async def test_other_machines_are_told_of_the_end_also_by_who_asks_twice(tmp_path: Path) -> None:
    """others.py 1."""
    others = AsyncMock(begin=Mock(), end=Mock(return_value=""), statuses=[], restarts={})

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    others.wait_there = others.wait_failed = never
    others.name_missing = AsyncMock(side_effect=LookupError("of its own"))

    @contextmanager
    def twice(interrupts: Interrupts) -> Iterator[None]:
        assert not interrupts.asked_again() and others.end.call_count == 0
        assert interrupts.asked_again() and others.end.call_count == 1
        yield

    shown = io.StringIO()
    given = ("run", "", Outputs(tmp_path), Plain(shown), Mock(), Mock())
    outcome = await asyncio.wait_for(drive.drive([], others, *given, twice), 30)
    assert outcome.interrupted and (others.begin.call_count, others.end.call_count) == (1, 2)
    assert "please report it: LookupError('of its own')" in shown.getvalue(), "nothing breaks in silence"


async def test_services_are_stopped_to_their_end_also_where_the_figure_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """drive.py 1."""
    stopped = asyncio.Event()

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async def stop(drain_s: float) -> None:
        await asyncio.sleep(0.2)
        stopped.set()

    @contextmanager
    def at_once(interrupts: Interrupts) -> Iterator[None]:
        interrupts.asked_again()
        yield

    services = Mock(stop=stop, wait_failed=never, statuses=[], restarts={})
    monkeypatch.setattr(drive, "Supervisor", Mock(return_value=services))
    others = Mock(wait_there=never, wait_failed=never, name_missing=never, end=Mock(return_value=""))
    others.statuses = []
    outputs = Outputs(tmp_path)
    monkeypatch.setattr(outputs, "draw", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    given = ("run", "", outputs, Plain(io.StringIO()), Mock(), Mock())
    with pytest.raises(OSError, match="No space left"):
        await asyncio.wait_for(drive.drive([], others, *given, at_once), 30)
    assert stopped.is_set()


async def test_who_ignores_the_end_of_the_terminal_is_left_alone() -> None:
    """drive.py 2: nohup."""
    interrupts = Interrupts(Mock(), Plain(io.StringIO()))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with drive.by_signals(interrupts):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupts.asked.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
