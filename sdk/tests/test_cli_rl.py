"""What `quartet rl` refuses before anything starts, and how it takes its output folder."""

from __future__ import annotations

import asyncio
import io
import json
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from quartet.cli import drive, rl
from quartet.cli.__main__ import build_parser, main
from quartet.cli.display import Plain
from quartet.cli.drive import Outcome
from quartet.cli.job import RECORD, Job, default_folder, model_path, plan, taken, write_down
from quartet.cli.outputs import Outputs
from quartet.cli.run_file import load_run
from quartet.config import ConfigError, load
from quartet.errors import QuartetError
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.local.supervisor import Status
from quartet.run.config import RunConfig, parse_run
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import orchestrator_service_pb2_grpc as rpc

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "reverse-text.toml"


@pytest.fixture
def config() -> RunConfig:
    return load(RunConfig, ["@", str(CONFIG)]).config


def test_the_demo_config_is_the_recipe(config: RunConfig) -> None:
    assert (config.batch_size, config.rollouts_per_example, config.groups_per_batch) == (128, 8, 16)
    assert config.checks.verify_logprobs
    assert config.inference["embedded"]["kv_on_update"] == "recompute"


def test_the_submitted_toml_is_the_same_run(config: RunConfig) -> None:
    job = Job(config, "r", Path("."))
    again = parse_run(job.config_toml)
    assert again == config.model_copy(
        update={"trainer": {}, "orchestrator": {}, "inference": {}, "envhost": {}}
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-stepz", "3"], "did you mean 'max_steps'"),
        (["--batch-size", "100"], "rollouts_per_example = 8 does not divide it; set it to 96 or 104"),
        (["--model", "no/such/model"], "'no/such/model' is neither a folder here nor a model in the"),
        (["--sampling.temperature", "hot"], "sampling.temperature"),
        (["stray"], "argument 'stray' is not understood"),
    ],
)
def test_refusals(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, model = tmp_path / "out", tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    command = ["rl", "@", str(CONFIG), "--model", str(model), *arguments, "--output-dir", str(output)]
    code = main(command)
    shown = capsys.readouterr().err
    assert code == 2
    assert sentence in shown
    assert shown.count("\n") == 1, "one sentence"
    assert not output.exists(), "nothing was begun"


def test_a_model_folder_is_taken_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "m").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json; name a Hugging Face model folder"):
        model_path("m")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORD).touch()
    with pytest.raises(ConfigError, match=r"wrote no model: 'quartet export run MODEL_FOLDER'"):
        model_path("run")
    for name in ("checkpoint", "checkpoint.partial"):
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "config.json").touch()
    with pytest.raises(ConfigError, match=r"has no config\.json; did you mean 'run/checkpoint'\?"):
        model_path("run")
    (tmp_path / "m" / "config.json").touch()
    with pytest.raises(ConfigError, match=r"no weights \(\*\.safetensors\) and no tokenizer"):
        model_path("m")
    (tmp_path / "m" / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ConfigError, match=r"has no tokenizer \(tokenizer\.json\) in"):
        model_path("m")
    (tmp_path / "m" / "tokenizer.json").touch()
    assert model_path("m") == str(tmp_path / "m")
    (tmp_path / "toys" / "tiny").mkdir(parents=True)
    (tmp_path / "toys" / "tiny" / "config.json").touch()
    with pytest.raises(ConfigError, match="did you mean 'toys/tiny'"):
        model_path("toys/tinny")
    with pytest.raises(ConfigError, match=r"fetch it with 'hf download owner/other'\Z"):
        model_path("owner/other")
    cached = tmp_path / "hub" / "models--owner--name"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (cached / "snapshots" / "abc" / name).touch()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert model_path("owner/name") == str(cached / "snapshots" / "abc")


def planned(config: RunConfig, folder: Path, run_id: str | None = None, **changes: bool) -> Job:
    return plan(config, folder, run_id, **{"resume": False, "overwrite": False, **changes})


def test_a_used_output_folder_is_refused_with_the_remedy(tmp_path: Path, config: RunConfig) -> None:
    folder = tmp_path / "run one"
    job = planned(config, folder)
    assert job.run_id == "run-one"
    assert not folder.exists(), "planning changes nothing"
    with taken(job), pytest.raises(ConfigError, match="belongs to a run that is going on"), taken(job):
        pass
    with pytest.raises(ConfigError, match="add --resume"):
        planned(config, folder)
    resumed = planned(config, folder, resume=True)
    assert resumed.resumed and resumed.config_toml == job.config_toml
    changed = config.model_copy(update={"max_steps": 7})
    shorter = (
        f"max_steps was {config.max_steps} and is 7, and a run is made longer, never shorter; start a new"
    )
    with pytest.raises(ConfigError, match=shorter) as caught:
        planned(changed, folder, resume=True)
    _, at, file, *where = shlex.split(str(caught.value).rpartition("say it as it was: quartet ")[2])
    assert (at, where) == ("@", ["--output-dir", str(folder), "--resume"])
    again = planned(load_run(["@", file]).config, folder, resume=True)
    assert again.config == config, "its services, too"
    record = json.loads((folder / "run.json").read_text())
    older = "\n".join(line for line in record["config_toml"].splitlines() if "gradient_accum" not in line)
    assert older != record["config_toml"].rstrip()
    (folder / "run.json").write_text(json.dumps(record | {"config_toml": older}))
    assert planned(config, folder, resume=True).resumed, "begun by a release that did not know the key"
    (folder / "metrics.jsonl").write_text("old")
    (folder / "logs").mkdir()
    with taken(resumed):
        assert (folder / "metrics.jsonl").exists(), "a resumed run keeps what it has"
    with taken(planned(changed, folder, overwrite=True)):
        assert sorted(entry.name for entry in folder.iterdir()) == [".lock", "run.json", "run.toml"]
        assert (folder / "run.toml").stat().st_mode & 0o077 == 0, "it may have keys of judges"
    assert planned(changed, folder, resume=True).config.max_steps == 7


def with_steps(config: RunConfig, max_steps: int) -> RunConfig:
    return config.model_copy(update={"max_steps": max_steps})


def ended(folder: Path, phase: str, steps: int) -> None:
    (folder / "summary.json").write_text(json.dumps({"phase": phase, "steps": steps, "wall_seconds": 1.0}))


def steps_of(folder: Path) -> tuple[int, int]:
    """As the folder's two records have it."""
    record = json.loads((folder / RECORD).read_text())["config_toml"]
    return parse_run(record).max_steps, load_run(["@", str(folder / "run.toml")]).config.max_steps


def test_a_completed_run_is_planned_with_more_steps_and_no_other(tmp_path: Path, config: RunConfig) -> None:
    folder = tmp_path / "run"
    short, longer = with_steps(config, 30), with_steps(config, 60)
    with taken(planned(short, folder)):
        pass
    for phase, steps in ((None, 0), ("stopped", 12), ("failed", 30), ("completed", 20)):
        if phase is not None:
            ended(folder, phase, steps)
        early = "max_steps was 30 and is 60, and a run is made longer once it is completed; let the run 'run'"
        with pytest.raises(ConfigError, match=rf"{early} go on as it was: quartet rl @ .*run.toml"):
            planned(longer, folder, resume=True)
    ended(folder, "completed", 30)
    assert rl.completed_before(planned(short, folder, resume=True))
    with pytest.raises(ConfigError, match="another configuration: seed was 0 and is 3; start a new run"):
        planned(longer.model_copy(update={"seed": 3}), folder, resume=True)
    job = planned(longer, folder, resume=True)
    assert job.extended and rl.completed_before(job) is None
    # Until the orchestrator has it the folder is the shorter run's.
    with taken(job):
        assert steps_of(folder) == (30, 30)
        write_down(job)
    assert steps_of(folder) == (60, 60)
    # The summary is that of the shorter one until the longer one ends, for now or for good.
    again = planned(longer, folder, resume=True)
    assert not again.extended and rl.completed_before(again) is None
    ended(folder, "completed", 60)
    assert rl.completed_before(planned(longer, folder, resume=True))
    with pytest.raises(
        ConfigError, match="max_steps was 60 and is 30, and a run is made longer, never shorter"
    ):
        planned(short, folder, resume=True)


def test_who_goes_on_with_a_completed_run_is_told_how(
    tmp_path: Path, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with taken(planned(config, tmp_path / "run")):
        pass
    summary = {"phase": "completed", "steps": 50, "wall_seconds": 1.0, "reward_before": 0.1}
    assert (
        rl._completed_again(planned(config, tmp_path / "run", resume=True), summary | {"reward_after": 0.2})
        == 0
    )
    assert "nothing is left to do; with max_steps above 50 it goes on from here\n" in capsys.readouterr().out


def test_what_another_launcher_wrote_since_the_look_is_kept(tmp_path: Path, config: RunConfig) -> None:
    first, second = planned(config, tmp_path / "run"), planned(config, tmp_path / "run")
    with taken(first):
        (tmp_path / "run" / "metrics.jsonl").write_text("hours of work")
    with pytest.raises(ConfigError, match="is not empty; add --resume"), taken(second):
        pass
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "hours of work"


def test_what_is_gone_on_with_is_what_the_folder_holds_once_it_is_locked(
    tmp_path: Path, config: RunConfig
) -> None:
    folder = tmp_path / "run"
    with taken(planned(config, folder)):
        pass
    resumed = planned(config, folder, resume=True)
    with taken(planned(config, folder, "other", overwrite=True)):
        pass
    with pytest.raises(ConfigError, match="was given to another run, 'other'"), taken(resumed):
        pass
    with taken(planned(config.model_copy(update={"max_steps": 7}), folder, "run", overwrite=True)):
        pass
    with pytest.raises(ConfigError, match="max_steps was 7"), taken(resumed):
        pass


def test_a_launcher_that_was_killed_before_it_began_is_not_in_the_way(
    tmp_path: Path, config: RunConfig
) -> None:
    (tmp_path / ".lock").touch()
    with taken(planned(config, tmp_path, "r")):
        assert (tmp_path / RECORD).exists()


def test_who_resumes_without_the_run_is_told_how(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["rl", "--resume"]) == 2
    assert capsys.readouterr().err.endswith("\n--resume: name the folder of the run with --output-dir\n")
    with taken(planned(config, Path("outputs/one"))):
        command = "quartet rl @ outputs/one/run.toml --output-dir outputs/one --resume\n"
    for arguments in ([], ["@", str(CONFIG)]):
        assert main(["rl", *arguments, "--resume"]) == 2
        assert capsys.readouterr().err.endswith(f"--output-dir; the newest of outputs/ goes on: {command}")
    for arguments in ([], ["@", str(CONFIG), "--max-stepz", "3"]):
        assert main(["rl", *arguments, "--resume", "--output-dir", "outputs/one"]) == 2
        assert capsys.readouterr().err.endswith(
            f"\n--resume wants the keys that the run began with: {command}"
        )


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
    with taken(planned(config, tmp_path / "run")):
        ended(tmp_path / "run", "completed", 50)
    before = (tmp_path / "run/summary.json").read_text()
    for _ in range(2):
        rl.launch(planned(with_steps(config, 60), tmp_path / "run", resume=True), Plain, time.monotonic())
    assert (tmp_path / "run/summary.json").read_text() == before


async def test_a_stop_before_the_run_was_taken_begins_nothing() -> None:
    display = Plain(io.StringIO())
    interrupts = drive.Interrupts(Mock(), display)
    work: asyncio.Task[Any] = asyncio.create_task(asyncio.sleep(60))
    interrupts.asked.set()
    await drive._stop_when_asked(interrupts, Mock(statuses=[]), "run", work, display, asyncio.Event())
    with pytest.raises(asyncio.CancelledError):
        await work


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


async def worked(orchestrator: rpc.OrchestratorServiceServicer, *given: Any) -> Any:
    """What `drive` does once its services are up, against this orchestrator."""
    add = rpc.add_OrchestratorServiceServicer_to_server
    server = await start(
        [Service("quartet.v1.OrchestratorService", add, orchestrator)], ServerConfig(), Health()
    )
    services = Mock(wait_bound=AsyncMock(), statuses=[Status("orchestrator", server.address)])
    try:
        return await drive._work(services, *given, asyncio.Event())
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
    async def against_it(_: object, *given: Any) -> object:
        return await worked(Refusing(takes=takes), *given[:-1])

    monkeypatch.setattr(rl, "drive", against_it)
    with pytest.raises(ConfigError, match=why):
        rl.launch(planned(config, tmp_path / "run"), Plain, time.monotonic())
    assert (tmp_path / "run" / RECORD).exists() == takes
    # One that was there before stays, as it was.
    with taken(planned(config, tmp_path / "old")):
        ended(tmp_path / "old", "completed", 50)
    with pytest.raises(ConfigError, match=why):
        rl.launch(planned(with_steps(config, 60), tmp_path / "old", resume=True), Plain, time.monotonic())
    steps = 60 if takes else 50
    assert steps_of(tmp_path / "old") == (steps, steps)


def test_overwrite_deletes_only_what_a_run_wrote(tmp_path: Path, config: RunConfig) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="was not written by quartet rl"):
        planned(config, tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match="holds no run"):
        planned(config, tmp_path / "nothing", resume=True)
    assert (tmp_path / "thesis.tex").exists()


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path: Path, config: RunConfig) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        with pytest.raises(ConfigError, match="is a file; name another --output-dir"):
            plan(config, folder, None, resume=False, overwrite=False)


def test_an_output_folder_that_takes_no_files_is_refused(tmp_path: Path, config: RunConfig) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(ConfigError, match="cannot be written: File too large; name another --output-dir"):
            taken(Job(config, "r", tmp_path / "run")).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(ConfigError, match="cannot be written"):  # as root, too, whom no permission stops
        taken(Job(config, "r", Path("/proc/quartet/run"))).__enter__()
    with taken(Job(config, "r", tmp_path / "run")):
        assert (tmp_path / "run" / RECORD).exists()


def test_a_damaged_record_is_refused_on_resume(tmp_path: Path, config: RunConfig) -> None:
    for damaged in ('{"run_id": "a"', '{"run_id": "a"}', "[]"):
        (tmp_path / RECORD).write_text(damaged)
        with pytest.raises(ConfigError, match="cannot be read"):
            plan(config, tmp_path, None, resume=True, overwrite=False)


def test_run_ids_are_checked(tmp_path: Path, config: RunConfig) -> None:
    for run_id in ("a/b", "..", "x" * 65):
        with pytest.raises(ConfigError, match=f"--run-id '{run_id}' is refused"):
            planned(config, tmp_path / "x", run_id)


def test_default_folder_is_named_after_the_last_config() -> None:
    assert str(default_folder(["@", "a.toml", "@", "dir/b.toml"])).startswith("outputs/b-")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    ours = ("rl", "eval", "env", "baseline", "gepa", "model")
    for command in (*ours, "submit", "watch", "runs", "stop", "resume"):
        assert f"\n    {command} " in shown


def test_the_command_needs_no_torch() -> None:
    code = "import sys, quartet.cli.__main__ as m; m.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_how_to_go_on_is_told_with_the_keys_that_were_said(tmp_path: Path) -> None:
    words = rl._words(["@", "my file.toml", "--env", '[{id = "x"}]'])
    told = words.going_on(tmp_path / "a b")
    assert shlex.split(told) == [
        *("quartet", "rl", "@", "my file.toml", "--env", '[{id = "x"}]'),
        *("--output-dir", str(tmp_path / "a b"), "--resume"),
    ]
