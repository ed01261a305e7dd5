"""Following a run through torn streams, an orchestrator that goes away, and a past with stops in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

import pytest
from quartet.cli import follow as following
from quartet.cli import held, watch
from quartet.cli.outputs import write_json
from quartet.cli.watch import all_events, watch_run
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.channel import connect
from quartet.kit.folder import lock_file
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import orchestrator_service_pb2_grpc as rpc

TRAINING, STOPPED, COMPLETED = pb.RUN_PHASE_TRAINING, pb.RUN_PHASE_STOPPED, pb.RUN_PHASE_COMPLETED


def phase(number: int, value: Any) -> pb.WatchRunResponse:
    return pb.WatchRunResponse(event=number, phase=pb.PhaseEvent(run=pb.Run(run_id="r", phase=value)))


def step(number: int) -> pb.WatchRunResponse:
    return pb.WatchRunResponse(event=number, step=pb.StepEvent(step=number))


class Orchestrator(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
    """Streams its events `per_call` at a time, then tears the stream; refuses every second call."""

    def __init__(self, events: list[pb.WatchRunResponse], per_call: int) -> None:
        self.events, self.per_call, self.calls = events, per_call, 0

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: object
    ) -> AsyncIterator[pb.WatchRunResponse]:
        self.calls += 1
        if request.run_id != "r":
            raise QuartetError("RUN_UNKNOWN", "no such run", run_id=request.run_id)
        if self.calls % 2 == 0:
            raise QuartetError("NOT_READY", "starting again")
        for event in [one for one in self.events if one.event > request.after_event][: self.per_call]:
            yield event


async def follow(
    events: list[pb.WatchRunResponse],
    per_call: int,
    run_id: str = "r",
    run: pb.Run | None = None,
    **changes: Any,
) -> list[int]:
    """Numbers of the events that arrive; of the run, where one is given, all of them."""
    service = Service(
        "quartet.v1.OrchestratorService",
        rpc.add_OrchestratorServiceServicer_to_server,
        Orchestrator(events, per_call),
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


async def test_silence_is_bounded_and_refusals_are_not_retried() -> None:
    with pytest.raises(QuartetError, match="NOT_READY"):
        await follow([step(1)], 100, patience_s=0.1)
    with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
        await follow([], 1, run_id="other")


async def test_that_nobody_answers_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "AWAY_SECONDS", 0.0)
    said: list[str] = []
    with pytest.raises(QuartetError, match="NOT_READY"):
        await follow([step(1)], 100, patience_s=1.0, say=said.append)
    assert len(said) == 1 and said[0].startswith("the orchestrator is away, waiting for it: ")


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
