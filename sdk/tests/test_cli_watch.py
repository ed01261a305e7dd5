"""Following a run through torn streams, an orchestrator that goes away, and a past with stops in it."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import kept_runs
import pytest
import structlog
from forked_command import quartet
from quartet.cli import follow as following
from quartet.cli import held, watch
from quartet.cli.__main__ import build_parser
from quartet.cli.outputs import write_json
from quartet.cli.watch import all_events, watch_run
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.call import RetryBudget
from quartet.kit.channel import connect
from quartet.kit.folder import lock_file
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import orchestrator_service_pb2_grpc as rpc

FULL = "the run waits for its journal: it took 7 of 9 bytes; make room there"
TRAINING, STOPPED, COMPLETED = pb.RUN_PHASE_TRAINING, pb.RUN_PHASE_STOPPED, pb.RUN_PHASE_COMPLETED


def phase(number: int, value: Any) -> pb.WatchRunResponse:
    return pb.WatchRunResponse(event=number, phase=pb.PhaseEvent(run=pb.Run(run_id="r", phase=value)))


def step(number: int) -> pb.WatchRunResponse:
    return pb.WatchRunResponse(event=number, step=pb.StepEvent(step=number))


class Orchestrator(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
    """Streams its events `per_call` at a time, then tears the stream; refuses every second call, or each
    where it is blocked."""

    def __init__(self, events: list[pb.WatchRunResponse], per_call: int, *, blocked: bool = False) -> None:
        self.events, self.per_call, self.calls, self.blocked = events, per_call, 0, blocked

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: object
    ) -> AsyncIterator[pb.WatchRunResponse]:
        self.calls += 1
        if request.run_id != "r":
            raise QuartetError("RUN_UNKNOWN", "no such run", run_id=request.run_id)
        if self.blocked:
            raise QuartetError("NOT_READY", FULL)
        if self.calls % 2 == 0:
            raise QuartetError("NOT_READY", "starting again")
        for event in [one for one in self.events if one.event > request.after_event][: self.per_call]:
            yield event


async def follow(
    events: list[pb.WatchRunResponse],
    per_call: int,
    run_id: str = "r",
    run: pb.Run | None = None,
    blocked: bool = False,
    **changes: Any,
) -> list[int]:
    """Numbers of the events that arrive; of the run, where one is given, all of them."""
    service = Service(
        "quartet.v1.OrchestratorService",
        rpc.add_OrchestratorServiceServicer_to_server,
        Orchestrator(events, per_call, blocked=blocked),
    )
    server = await start([service], ServerConfig(), Health())
    settings: dict[str, Any] = {"history": 0, "include_rollouts": False, "patience_s": 60.0, **changes}
    try:
        async with connect(server.address) as channel:
            stub = rpc.OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
            if run is not None:
                del settings["history"]
                return [event.event async for event in all_events(stub, run, 0, **settings)]
            return [event.event async for event in watch_run(stub, run_id, 0, **settings)]
    finally:
        await server.stop(0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "RETRY_SECONDS", 0.01)


@pytest.mark.parametrize("per_call", [1, 2, 100])
async def test_every_event_once_over_torn_streams(per_call: int) -> None:
    events = [phase(1, TRAINING), step(2), step(3), step(4), phase(5, COMPLETED), step(6)]
    assert await follow(events, per_call) == [1, 2, 3, 4, 5], "nothing after the end"


async def test_an_old_stop_does_not_end_a_resumed_run() -> None:
    events = [step(1), phase(2, STOPPED), phase(3, TRAINING), step(4), phase(5, STOPPED), step(6)]
    assert await follow(events, 100) == [1, 2]
    assert await follow(events, 100, history=3) == [1, 2, 3, 4, 5]


async def test_an_end_that_was_gone_on_from_hides_nothing_behind_it() -> None:
    """Of a run that is extended and has ended again, for who has seen nothing yet; and while it runs."""
    events = [step(1), phase(2, COMPLETED), phase(3, TRAINING), step(4), phase(5, COMPLETED)]
    assert await follow(events, 100, run=pb.Run(run_id="r", phase=COMPLETED, last_event=5)) == [1, 2, 3, 4, 5]
    assert await follow(events, 100, run=pb.Run(run_id="r", phase=TRAINING, last_event=3)) == [1, 2, 3, 4, 5]


async def test_a_run_that_was_set_aside_says_why_it_has_no_events() -> None:
    with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
        await follow([], 1, run=pb.Run(run_id="other", phase=pb.RUN_PHASE_FAILED))


async def test_silence_is_bounded_and_refusals_are_not_retried() -> None:
    with pytest.raises(QuartetError, match="NOT_READY"):
        await follow([step(1)], 100, patience_s=0.1)
    with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
        await follow([], 1, run_id="other")


async def test_who_was_stopped_itself_has_not_been_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """watch.py 3: Ctrl-Z, and `fg` an hour later: the reading timer is due before what came is read."""
    monotonic, calls = time.monotonic, 0

    async def stream(call: object, idle_timeout_s: float) -> AsyncIterator[pb.WatchRunResponse]:
        nonlocal calls
        calls += 1
        if calls == 3:
            yield phase(1, COMPLETED)
            return
        if calls == 1:
            yield pb.WatchRunResponse()
        slept_s = 3600 * calls
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + slept_s)
        raise QuartetError("DEADLINE", "the stream was silent for 20 s")

    monkeypatch.setattr(watch, "stream", stream)
    settings: dict[str, Any] = {"history": 0, "include_rollouts": False, "patience_s": 120.0}
    assert [event.event async for event in watch_run(Mock(), "r", 0, **settings)] == [1]


class Busy(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
    """Says where a run stands once it was asked more often than a call tries."""

    def __init__(self, reason: str) -> None:
        self.reason, self.calls = reason, 0

    async def GetRunStatus(self, request: pb.GetRunStatusRequest, context: object) -> pb.GetRunStatusResponse:
        self.calls += 1
        if self.calls <= 2 * RetryBudget().max_attempts:
            raise QuartetError(self.reason, "3 RPCs are under way here", retry_after_ms=1)
        return pb.GetRunStatusResponse(run=pb.Run(run_id=request.run_id, step=3))


async def test_an_orchestrator_that_answers_too_many_is_waited_for_from_the_first_call_on() -> None:
    said = list[str]()

    async def ask(reason: str, patience_s: float) -> pb.Run:
        add = rpc.add_OrchestratorServiceServicer_to_server
        server = await start(
            [Service("quartet.v1.OrchestratorService", add, Busy(reason))], ServerConfig(), Health()
        )
        try:
            async with connect(server.address) as channel:
                stub = rpc.OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
                return await watch.run_as_it_stands(stub, "r", patience_s=patience_s, say=said.append)
        finally:
            await server.stop(0)

    assert (await ask("OVERLOADED", 60.0)).step == 3
    assert said == ["the orchestrator answers and cannot go on, waiting for it: 3 RPCs are under way here"]
    for reason, patience_s in (("OVERLOADED", 0.0), ("NOT_READY", 60.0)):
        with pytest.raises(QuartetError, match=reason):
            await ask(reason, patience_s)


class StartedAgain(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
    """Says of a run that it rests and is started again, so often; then that it stands like this."""

    def __init__(self, run: pb.Run, times: int) -> None:
        self.run, self.times, self.calls = run, times, 0

    async def GetRunStatus(self, request: pb.GetRunStatusRequest, context: object) -> pb.GetRunStatusResponse:
        self.calls += 1
        resting = pb.Run(run_id="r", phase=STOPPED, doing="is being started again")
        return pb.GetRunStatusResponse(run=resting if self.calls <= self.times else self.run)

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: object
    ) -> AsyncIterator[pb.WatchRunResponse]:
        for event in (phase(1, STOPPED), phase(2, TRAINING), phase(3, COMPLETED)):
            if request.after_event < event.event <= (3 if self.run.phase == TRAINING else 1):
                yield event


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_run_that_is_being_started_again_is_followed_and_one_that_nobody_goes_on_with_has_ended(
    goes_on: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """watch.py 5: as `quartet watch` meets it."""
    then = pb.Run(run_id="r", phase=TRAINING if goes_on else STOPPED, last_event=2 if goes_on else 1)
    orchestrator = StartedAgain(then, times=3)
    add = rpc.add_OrchestratorServiceServicer_to_server
    server = await start(
        [Service("quartet.v1.OrchestratorService", add, orchestrator)], ServerConfig(), Health()
    )
    options, _ = build_parser().parse_known_args(["watch", "r"])
    try:
        async with connect(server.address) as channel:
            stub = rpc.OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
            code = await following.watch(stub, options, [])
    finally:
        await server.stop(0)
    told = capsys.readouterr()
    assert told.err == "run r is stopped, and is being started again: it is followed from there on\n"
    assert orchestrator.calls == 4 and code == (0 if goes_on else 130)
    assert ("run r: completed" in told.out) == goes_on and "run r: stopped" in told.out


class Unread(StartedAgain):
    """Has a run's journal not open yet, for so many calls; before it is, nothing else of it is told."""

    async def GetRunStatus(self, request: pb.GetRunStatusRequest, context: object) -> pb.GetRunStatusResponse:
        self.calls += 1
        unread = pb.Run(run_id="r", phase=pb.RUN_PHASE_PENDING, doing="run 'r' waits: it is read later")
        return pb.GetRunStatusResponse(run=unread if self.calls <= self.times else self.run)


async def test_a_run_that_is_not_read_yet_is_followed_as_what_it_turns_out_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """watch.py 6: beyond an end that it has behind it, and into the folder that it has."""
    then = pb.Run(run_id="r", phase=TRAINING, last_event=2, submitted_at_ms=7)
    orchestrator = Unread(then, times=3)
    write_json(tmp_path / following.RECORD, {"run_id": "r", "submitted_at_ms": 7})
    options, _ = build_parser().parse_known_args(["watch", "r", "--output-dir", str(tmp_path)])
    async with kept_runs.serving(orchestrator) as address, connect(address) as channel:
        stub = rpc.OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
        assert await following.watch(stub, options, []) == 0
        told = capsys.readouterr()
        assert "run r: completed" in told.out and told.err.count("waits: it is read later\n") == 1
        assert orchestrator.calls == 4
        monkeypatch.setattr(following, "PATIENCE_SECONDS", 0.0)
        orchestrator.calls = 0
        with pytest.raises(QuartetError, match="it is read later") as caught:
            await following.watch(stub, options, [])
        assert caught.value.reason == "NOT_READY"


async def test_who_was_to_start_a_run_again_and_has_gone_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """watch.py 5: its services ended with it."""
    monkeypatch.setattr(watch, "GONE_SECONDS", 0.05)
    monkeypatch.setattr(watch, "CALL_SECONDS", 0.5)
    resting = pb.Run(run_id="r", phase=STOPPED, doing="is being started again")
    async with connect("127.0.0.1:1") as channel:
        stub = rpc.OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
        async with asyncio.timeout(20):
            with pytest.raises(QuartetError, match=r"NOT_READY|DEADLINE"):
                await watch.started_again(stub, resting, say=lambda _: None)


async def test_another_service_at_its_address_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """watch.py 4: addresses of containers are handed on."""
    monkeypatch.setattr(watch, "AWAY_SECONDS", 0.0)
    events = [step(1), step(2), phase(3, COMPLETED)]
    service = Service(
        "quartet.v1.OrchestratorService",
        rpc.add_OrchestratorServiceServicer_to_server,
        Orchestrator(events, 1),
    )
    server = await start([service], ServerConfig(), Health())
    address, seen, said = server.address, [], list[str]()
    try:
        async with connect(address) as channel, asyncio.timeout(60):
            stub = rpc.OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
            watched = watch_run(
                stub, "r", 0, history=0, include_rollouts=False, patience_s=60.0, say=said.append
            )
            seen.append((await anext(watched)).event)
            await server.stop(0)
            with structlog.testing.capture_logs() as logs:
                server = await start([], ServerConfig(address=address), Health())
                following = asyncio.ensure_future(anext(watched))
                while not any(one["event"] == "rpc refused" for one in logs):
                    assert not following.done(), following.exception()
                    await asyncio.sleep(0.01)
            await server.stop(0)
            server = await start([service], ServerConfig(address=address), Health())
            seen.append((await following).event)
            seen += [event.event async for event in watched]
    finally:
        await server.stop(0)
    assert seen == [1, 2, 3]
    assert said and said[0].startswith("the orchestrator is away, waiting for it: "), said


async def test_who_was_told_that_it_is_away_is_told_once_that_it_is_back_and_after_how_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """watch.py 3: of several outages, each; of what was over before anybody was told, nothing."""
    events = [*map(step, range(1, 6)), phase(6, COMPLETED)]
    said: list[str] = []
    monkeypatch.setattr(watch, "AWAY_SECONDS", math.inf)  # however slow the machine is
    assert await follow(events, 2, say=said.append) == [1, 2, 3, 4, 5, 6] and not said
    monkeypatch.setattr(watch, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(watch, "RETRY_SECONDS", 0.6)  # a pause before the call that is refused, and one after
    assert await follow(events, 2, say=said.append) == [1, 2, 3, 4, 5, 6]
    back = [line for line in said if "is back" in line]
    assert len(back) == 2 and said[-1] == back[-1]
    assert all(re.fullmatch("the orchestrator is back after [1-9][0-9]* s", line) for line in back), back


async def test_an_outage_is_said_once_for_what_it_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """watch.py 3: one that is away, then answers, then is away again, and so on."""
    monkeypatch.setattr(watch, "AWAY_SECONDS", 0.0)
    said: list[str] = []
    with pytest.raises(QuartetError, match="NOT_READY"):
        await follow([step(1)], 100, patience_s=1.0, say=said.append)
    ways = [line.partition(", waiting for it: ")[0] for line in said]
    assert ways == ["the orchestrator is away", "the orchestrator answers and cannot go on"]


async def test_an_orchestrator_that_answers_is_not_called_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """watch.py 3: whose disk is full is up, and says it."""
    monkeypatch.setattr(watch, "AWAY_SECONDS", 0.0)
    said: list[str] = []
    with pytest.raises(QuartetError, match="make room there"):
        await follow([step(1)], 100, patience_s=1.0, blocked=True, say=said.append)
    assert said == [f"the orchestrator answers and cannot go on, waiting for it: {FULL}"]


async def test_an_orchestrator_that_nothing_comes_from_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """watch.py 3: neither from its port nor over a stream that is open."""
    monkeypatch.setattr(watch, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(watch, "IDLE_SECONDS", 0.2)

    class Silent(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
        async def WatchRun(
            self, request: pb.WatchRunRequest, context: object
        ) -> AsyncIterator[pb.WatchRunResponse]:
            await asyncio.sleep(60)
            yield step(1)

    add = rpc.add_OrchestratorServiceServicer_to_server
    server = await start([Service("quartet.v1.OrchestratorService", add, Silent())], ServerConfig(), Health())
    settings: dict[str, Any] = {"history": 0, "include_rollouts": False, "patience_s": 0.5}
    said: list[str] = []
    for why in ("the stream was silent for 0.2 s", ""):
        async with connect(server.address) as channel:
            stub = rpc.OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(QuartetError):
                async for _ in watch_run(stub, "r", 0, **settings, say=said.append):
                    pass
        assert said.pop().startswith(f"the orchestrator is away, waiting for it: {why}") and not said
        await server.stop(0)


@pytest.mark.parametrize("folder", ["/proc/x", "{tmp}/file", "{tmp}/file/below"])
async def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    servicer, given = kept_runs.Orchestrator(), folder.format(tmp=tmp_path)
    servicer.runs["r"] = pb.Run(run_id="r", phase=COMPLETED)
    async with kept_runs.serving(servicer) as address:
        watched = await quartet("watch", "r", "--orchestrator", address, "--output-dir", given)
    code, printed = watched
    assert code == 2 and printed.startswith(f"error: --output-dir = {given!r} cannot be used: "), printed
    assert "name a folder that this user can write" in printed and printed.count("\n") == 1


def test_a_folder_that_cannot_be_read_or_whose_record_is_no_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / following.RECORD).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="something else than the run 'r'"):
        following.taken(tmp_path, pb.Run(run_id="r")).__enter__()
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(ConfigError, match="cannot be read: Permission denied; name another --output-dir"):
        following.taken(tmp_path, pb.Run(run_id="r")).__enter__()


def test_how_a_run_ended_stays_known_until_it_is_followed_to_another_end(tmp_path: Path) -> None:
    run = pb.Run(run_id="r", submitted_at_ms=2)
    with following.taken(tmp_path, run):
        written = json.loads((tmp_path / following.RECORD).read_text())
    assert written == {"run_id": "r", "submitted_at_ms": 2}
    write_json(tmp_path / following.RECORD, written | {following.END: {"phase": "stopped"}})
    with following.taken(tmp_path, run):
        assert json.loads((tmp_path / following.RECORD).read_text())[following.END] == {"phase": "stopped"}
    for another in (pb.Run(run_id="r", submitted_at_ms=3), pb.Run(run_id="s", submitted_at_ms=2)):
        with pytest.raises(ConfigError, match="holds something else"):
            following.taken(tmp_path, another).__enter__()


def test_a_folder_that_another_took_since_the_look_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another_was_quicker(file: Path) -> IO[bytes]:
        write_json(tmp_path / following.RECORD, {"run_id": "theirs", "submitted_at_ms": 1})
        return lock_file(file)

    monkeypatch.setattr(held, "lock_file", another_was_quicker)
    run = pb.Run(run_id="mine", submitted_at_ms=2)
    with pytest.raises(ConfigError, match="something else than the run 'mine'"):
        following.taken(tmp_path, run).__enter__()
    assert "theirs" in (tmp_path / following.RECORD).read_text()
