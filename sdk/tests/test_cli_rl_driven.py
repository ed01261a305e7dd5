"""A run of `quartet rl` as it is driven: what is shown of it, and what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from planned_runs import accepted, ended, planned, steps_of, with_steps
from quartet.cli import drive, rl, starting, watch
from quartet.cli.display import Plain
from quartet.cli.drive import Outcome
from quartet.cli.ended import Ended, say_ended
from quartet.cli.job import RECORD
from quartet.cli.outputs import Outputs
from quartet.cli.overwritten import FAILED_LOGS
from quartet.cli.starting import Start
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.local.supervisor import ServiceFailed, State, Status
from quartet.run.config import RunConfig
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import orchestrator_service_pb2_grpc as rpc


def test_the_seconds_of_a_run_are_those_of_all_its_parts(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drive(*_: object) -> Outcome:
        return Outcome(pb.Run(run_id="run", phase=pb.RUN_PHASE_STOPPED), {}, interrupted=True)

    monkeypatch.setattr(rl, "drive", drive)
    told = []
    for part in range(3):
        job = planned(config, tmp_path / "run", resume=part > 0)
        told.append(rl.launch(job, Plain, time.monotonic() - 10).summary["wall_seconds"])
    assert told == pytest.approx([10, 20, 30], abs=5)


def test_a_part_that_began_nothing_leaves_what_the_last_one_said(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Ctrl-C comes while the services start: the run goes on as before, and with more steps."""

    async def drive(*_: object) -> Outcome:
        return Outcome(pb.Run(), {}, interrupted=True)

    monkeypatch.setattr(rl, "drive", drive)
    with accepted(planned(config, tmp_path / "run")):
        ended(tmp_path / "run", "completed", 50)
    before = (tmp_path / "run/summary.json").read_text()
    for _ in range(2):
        rl.launch(planned(with_steps(config, 60), tmp_path / "run", resume=True), Plain, time.monotonic())
    assert (tmp_path / "run/summary.json").read_text() == before


def test_what_a_run_said_of_itself_is_repeated_at_its_end(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def drive(_0: object, _1: object, _2: object, _3: object, outputs: Outputs, *_: object) -> Outcome:
        outputs.record(pb.WatchRunResponse(event=1, note=pb.NoteEvent(message="lower learning_rate")))
        return Outcome(pb.Run(run_id="run", phase=pb.RUN_PHASE_COMPLETED, step=3), {}, interrupted=False)

    monkeypatch.setattr(rl, "drive", drive)
    job = planned(config, tmp_path / "run")
    completed = rl.launch(job, Plain, time.monotonic())
    assert completed.summary["notes"] == ["lower learning_rate"]
    capsys.readouterr()
    assert say_ended(job, completed) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "it was said on the way: lower learning_rate"


def test_a_run_of_several_parts_says_at_its_end_what_each_agent_earned_before_and_after(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured before a part that goes on is in the folder."""

    async def drive(_0: object, _1: object, _2: object, _3: object, outputs: Outputs, *_: object) -> Outcome:
        phase, steps = parts.pop(0)
        metrics = {"eval/reward": 0.0, "eval/game/reward": 0.0} | {
            f"eval/game/agents/{role}/reward": reward for role, reward in (("red", steps), ("blue", -steps))
        }
        measured = pb.EvalEvent(step=steps, metrics=metrics)
        outputs.record(pb.WatchRunResponse(event=1 + steps, eval=measured))
        run = pb.Run(run_id="run", phase=phase, step=steps, reward_before=0.0)
        if steps:
            run.reward_after = 0.0
        return Outcome(run, {}, interrupted=phase == pb.RUN_PHASE_STOPPED)

    parts = [(pb.RUN_PHASE_STOPPED, 0), (pb.RUN_PHASE_COMPLETED, 50)]
    monkeypatch.setattr(rl, "drive", drive)
    with accepted(planned(config, tmp_path / "run")):
        ended(tmp_path / "run", "stopped", 1)
    while parts:
        job = planned(config, tmp_path / "run", resume=True)
        done = rl.launch(job, Plain, time.monotonic())
    earned = {role: done.summary[f"agents_{role}"] for role in ("before", "after")}
    assert earned == {"before": {"game": {"red": 0, "blue": 0}}, "after": {"game": {"red": 50, "blue": -50}}}
    capsys.readouterr()
    say_ended(job, done)
    line = "completed: reward blue 0.000 -> -50.000, red 0.000 -> 50.000 in 50 steps"
    assert capsys.readouterr().out.startswith(line)


def test_what_earlier_parts_of_a_run_said_is_repeated_too(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drive(_0: object, _1: object, _2: object, _3: object, outputs: Outputs, *_: object) -> Outcome:
        # The last one of the part before is told again: nothing was recorded behind it.
        for event in parts.pop(0):
            outputs.record(pb.WatchRunResponse(event=event, note=pb.NoteEvent(message=f"note {event}")))
        return Outcome(pb.Run(run_id="run", phase=pb.RUN_PHASE_STOPPED, step=event), {}, interrupted=True)

    parts = [range(1, 4), range(3, 6), range(5, 8)]
    monkeypatch.setattr(rl, "drive", drive)
    with accepted(planned(config, tmp_path / "run")):
        ended(tmp_path / "run", "stopped", 1)
    for said in ("123", "12345", "34567"):
        job = planned(config, tmp_path / "run", resume=True)
        summary = rl.launch(job, Plain, time.monotonic()).summary
        assert summary["notes"] == [f"note {number}" for number in said], "the last five"


def test_an_attempt_that_took_a_folder_and_did_not_begin_says_that_it_gave_it_back(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stopped(*_: object) -> Outcome:
        return Outcome(pb.Run(), {}, interrupted=True)

    async def failed(*_: object) -> Outcome:
        raise ServiceFailed("trainer did not start")

    with accepted(planned(config, tmp_path / "run")):
        ended(tmp_path / "run", "completed", 50)
    job = planned(config, tmp_path / "run", overwrite=True)
    monkeypatch.setattr(rl, "drive", stopped)
    assert say_ended(job, rl.launch(job, Plain, time.monotonic())) == 130
    assert f"stopped before the run began; {job.folder} holds what it held\n" in capsys.readouterr().out
    monkeypatch.setattr(rl, "drive", failed)
    with pytest.raises(
        rl.RunFailed, match=r"did not start\nThe run did not begin; .* holds what it held"
    ) as said:
        rl.launch(job, Plain, time.monotonic())
    assert said.value.logs == FAILED_LOGS

    async def without_room(*_: object) -> Outcome:
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(rl, "drive", without_room)
    with pytest.raises(
        rl.RunFailed, match=r"No space left on device; [^\n]*\nThe run did not begin; "
    ) as said:
        rl.launch(job, Plain, time.monotonic())
    assert said.value.logs == FAILED_LOGS
    assert json.loads((job.folder / "summary.json").read_text())["steps"] == 50


def test_a_run_that_stopped_by_itself_failed_and_says_how_it_goes_on(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drive(*_: object) -> Outcome:
        stopped = pb.Run(phase=pb.RUN_PHASE_STOPPED, error="10 groups in a row ended with nothing")
        return Outcome(stopped, {}, interrupted=False)

    monkeypatch.setattr(rl, "drive", drive)
    job = planned(config, tmp_path / "run")
    with pytest.raises(rl.RunFailed, match="is stopped: 10 groups in a row ended with nothing; go on with: "):
        rl.launch(job, Plain, time.monotonic())


def test_a_run_that_failed_while_it_was_asked_to_stop_has_failed(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rl.py 2."""

    async def drive(*_: object) -> Outcome:
        return Outcome(pb.Run(phase=pb.RUN_PHASE_FAILED, error="no such model"), {}, interrupted=True)

    monkeypatch.setattr(rl, "drive", drive)
    with pytest.raises(rl.RunFailed, match="the run is failed: no such model"):
        rl.launch(planned(config, tmp_path / "run"), Plain, time.monotonic())


@pytest.mark.parametrize("external", [False, True])
def test_a_stopped_run_names_the_command_for_its_model_where_it_has_one(
    tmp_path: Path, config: RunConfig, capsys: pytest.CaptureFixture[str], external: bool
) -> None:
    job = planned(config.model_copy(update={"external_trainer": external}), tmp_path / "my run")
    say_ended(job, Ended({"steps": 3}, completed=False, shown=""))
    said = capsys.readouterr().out
    written = f"quartet export '{job.folder}' MODEL_FOLDER" in said  # as a shell takes it
    assert "stopped after step 3; go on with: " in said and written is not external


class Refusing(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
    """Refuses the run, or takes it and refuses to go on with it."""

    def __init__(self, *, takes: bool) -> None:
        self.takes = takes

    async def SubmitRun(self, request: pb.SubmitRunRequest, context: object) -> pb.SubmitRunResponse:
        if not self.takes:
            raise QuartetError("INVALID_CONFIG", "max_steps = 0 is refused")
        return pb.SubmitRunResponse(run=pb.Run(run_id=request.run_id, phase=pb.RUN_PHASE_STOPPED))

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: object) -> pb.ResumeRunResponse:
        raise QuartetError("ENVIRONMENT_UNKNOWN", "reverse-text is gone")


async def worked(
    orchestrator: rpc.OrchestratorServiceServicer, *given: Any, begun: Start | None = None
) -> Any:
    """What `drive` does once its services are up, against this orchestrator."""
    add = rpc.add_OrchestratorServiceServicer_to_server
    server = await start(
        [Service("quartet.v1.OrchestratorService", add, orchestrator)], ServerConfig(), Health()
    )
    services = Mock(wait_bound=AsyncMock(), statuses=[Status("orchestrator", server.address)])
    try:
        return await drive._work(services, AsyncMock(), *given, begun or Start())
    finally:
        await server.stop(0)


class Extended(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
    """Has a run whose second part is begun by SubmitRun and does one step."""

    def __init__(self) -> None:
        self.events: list[pb.WatchRunResponse] = []
        self.run = pb.Run(run_id="run", submitted_at_ms=1, max_steps=1)
        self._tell(1000, phase=pb.RUN_PHASE_TRAINING)
        self._tell(2000, step=1)
        self._tell(3000, phase=pb.RUN_PHASE_COMPLETED)

    def _tell(self, at_ms: int, phase: pb.RunPhase | None = None, step: int = 0) -> None:
        event = pb.WatchRunResponse(event=len(self.events) + 1, at_ms=at_ms)
        self.run.last_event = event.event
        if phase is not None:
            self.run.phase = phase
            event.phase.run.CopyFrom(self.run)
        else:
            self.run.step = step
            event.step.CopyFrom(pb.StepEvent(step=step, metrics={"train/reward": step / 10}))
        self.events.append(event)

    async def SubmitRun(self, request: pb.SubmitRunRequest, context: object) -> pb.SubmitRunResponse:
        now = int(time.time() * 1000)
        self.run.max_steps = 2
        self._tell(now, phase=pb.RUN_PHASE_PENDING)
        submitted = pb.SubmitRunResponse(run=self.run)
        self._tell(now, phase=pb.RUN_PHASE_TRAINING)
        self._tell(now, step=2)
        self._tell(now, phase=pb.RUN_PHASE_COMPLETED)
        return submitted

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: object
    ) -> AsyncIterator[pb.WatchRunResponse]:
        for event in self.events[request.after_event :]:
            yield event

    async def GetRunStatus(self, request: pb.GetRunStatusRequest, context: object) -> pb.GetRunStatusResponse:
        return pb.GetRunStatusResponse(run=self.run)


async def test_what_a_start_waits_for_is_told_while_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "PATIENT_SECONDS", 0.01)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    trainer = Status("trainer", "127.0.0.1:1", State.STARTING, pid=7)
    services = Mock(stop=AsyncMock(), wait_failed=never, wait_bound=never, statuses=[trainer], restarts={})
    monkeypatch.setattr(drive, "Supervisor", Mock(return_value=services))
    others = Mock(wait_there=AsyncMock(), wait_failed=never, name_missing=never, end=Mock(return_value=""))
    others.statuses, shown = [], io.StringIO()
    given = ("run", "", Outputs(tmp_path), Plain(shown), Mock(), Mock(), drive.by_signals)
    task = asyncio.create_task(drive.drive([], others, *given))
    async with asyncio.timeout(60):
        while "waiting for trainer (starting)" not in shown.getvalue():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("takes", [True, False])
async def test_a_run_that_was_handed_over_is_waited_for_until_it_is_taken(
    takes: bool, tmp_path: Path
) -> None:
    start, orchestrator = Start(), Extended() if takes else Refusing(takes=False)
    given = (orchestrator, "run", "", Outputs(tmp_path), Plain(io.StringIO()), Mock(), Mock())
    with contextlib.nullcontext() if takes else pytest.raises(drive.RunRefused):
        await worked(*given, begun=start)
    assert start.submitted.is_set() and start.accepted.is_set() == takes


class Resting(rpc.OrchestratorServiceServicer):  # type: ignore[misc]
    """Has a run in some phase, which goes on."""

    def __init__(self, phase: pb.RunPhase) -> None:
        self.phase = phase

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: object) -> pb.ResumeRunResponse:
        return pb.ResumeRunResponse(run=pb.Run(run_id=request.run_id, phase=pb.RUN_PHASE_PENDING))

    async def SubmitRun(self, request: pb.SubmitRunRequest, context: object) -> pb.SubmitRunResponse:
        return pb.SubmitRunResponse(run=pb.Run(run_id=request.run_id, phase=self.phase))


@pytest.mark.parametrize(
    "phase",
    [pb.RUN_PHASE_STOPPED, pb.RUN_PHASE_STOPPING, pb.RUN_PHASE_FAILED],  # STOPPING: killed in a stop
)
async def test_a_run_that_rests_or_is_about_to_is_gone_on_with(
    phase: pb.RunPhase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[pb.RunPhase] = []

    async def followed(_stub: object, run: pb.Run, *_: object) -> None:
        begun.append(run.phase)

    monkeypatch.setattr(drive, "_followed", followed)
    monkeypatch.setattr(drive, "_result", AsyncMock(return_value=pb.Run(phase=pb.RUN_PHASE_COMPLETED)))
    await worked(Resting(phase), "run", "", Outputs(tmp_path), Plain(io.StringIO()), Mock(), Mock())
    assert begun == [pb.RUN_PHASE_PENDING]


async def test_only_what_happens_now_is_shown_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """Also where the folder lacks what came before."""
    shown, outputs, accepted = io.StringIO(), Outputs(tmp_path), Mock()
    run = await worked(Extended(), "run", "", outputs, Plain(shown), Mock(), accepted)
    assert run.step == 2 and accepted.call_count == 1
    told = [line.split("s  ", 1)[1].split("  ")[0] for line in shown.getvalue().splitlines()]
    assert told == [
        "goes on after step 1 of 2",
        "run run: pending",
        "run run: training",
        "step 2/2",
        "run run: completed",
    ]
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]


async def test_while_a_model_is_copied_everything_else_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs, orchestrator, loop = Outputs(tmp_path), Extended(), asyncio.get_running_loop()
    orchestrator.run.model_path = "/model"

    def copy(model_path: Path) -> None:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(30)

    copying = Mock(side_effect=copy)
    monkeypatch.setattr(outputs, "take_checkpoint", copying)
    await worked(orchestrator, "run", "", outputs, Plain(io.StringIO()), Mock(), Mock())
    copying.assert_called_once_with(Path("/model"))


class WithoutRoom(Extended):
    """Its journal cannot be written at first."""

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: object
    ) -> AsyncIterator[pb.WatchRunResponse]:
        self.asked = getattr(self, "asked", 0) + 1
        if self.asked < 3:
            raise QuartetError("NOT_READY", "the run waits for its journal: is the disk full?")
        async for event in super().WatchRun(request, context):
            yield event


async def test_who_waits_for_the_journal_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """drive.py 4: whoever sees it can make room."""
    monkeypatch.setattr(watch, "AWAY_SECONDS", 0.0)
    shown = io.StringIO()
    await worked(WithoutRoom(), "run", "", Outputs(tmp_path), Plain(shown), Mock(), Mock())
    said = "the orchestrator answers and cannot go on, waiting for it: the run waits for its journal"
    assert shown.getvalue().count(f"{said}: is the disk full?") == 1


async def test_a_folder_whose_journal_is_gone_is_not_gone_on_with(tmp_path: Path) -> None:
    outputs, accepted, orchestrator = Outputs(tmp_path), Mock(), Extended()
    outputs.progress.apply(pb.WatchRunResponse(event=9, at_ms=1, note=pb.NoteEvent()))
    with pytest.raises(drive.RunRefused, match=r"knows 4 events of the run 'run', and .* has 9: its journal"):
        await worked(orchestrator, "run", "", outputs, Plain(io.StringIO()), Mock(), accepted)
    assert not accepted.called


@pytest.mark.parametrize(("takes", "why"), [(False, "max_steps = 0 is refused"), (True, "reverse-text is")])
def test_the_folder_of_a_run_is_deleted_only_where_the_run_was_not_taken(
    takes: bool, why: str, tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def against_it(specs: object, others: object, *given: Any) -> object:
        return await worked(Refusing(takes=takes), *given[:-3])

    monkeypatch.setattr(rl, "drive", against_it)
    with pytest.raises(ConfigError, match=why):
        rl.launch(planned(config, tmp_path / "run"), Plain, time.monotonic())
    assert (tmp_path / "run" / RECORD).exists() == takes
    # One that was there before stays, as it was.
    with accepted(planned(config, tmp_path / "old")):
        ended(tmp_path / "old", "completed", 50)
    with pytest.raises(ConfigError, match=why):
        rl.launch(planned(with_steps(config, 60), tmp_path / "old", resume=True), Plain, time.monotonic())
    steps = 60 if takes else 50
    assert steps_of(tmp_path / "old") == (steps, steps)
