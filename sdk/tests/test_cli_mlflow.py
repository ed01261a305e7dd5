"""A run in MLflow, by the real library, in a store of its own: promises of quartet.cli.mlflow.child."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.clients import _not_sent
from quartet.cli.elsewhere import reporter as reporting_module
from quartet.cli.elsewhere.child import STOPPED_CODE, Ending
from quartet.cli.elsewhere.process import Process
from quartet.cli.elsewhere.reporter import reporting
from quartet.cli.follow import WatchConfig as Shown
from quartet.cli.follow import shown_as
from quartet.cli.mlflow.child import (
    IDENTITY,
    MAX_METRICS,
    SENT,
    Apart,
    Logged,
    Plan,
    address_of,
    flat,
    parts,
)
from quartet.cli.mlflow.place import Mlflow, check
from quartet.cli.outputs import Outputs, recover_lines
from quartet.cli.points import Point
from quartet.cli.reporting import reporting as reporting_everywhere
from quartet.config import ConfigError
from quartet.run.config import parse_run
from quartet.run.mlflow import MlflowConfig, named
from quartet.run.wandb import WandbConfig
from quartet.run.written_out import is_same_run
from quartet.v1.orchestrator_service_pb2 import (
    EvalEvent,
    Ledger,
    PhaseEvent,
    Run,
    StepEvent,
    WatchRunResponse,
)

STEPS = 4
TEXT = (
    "learning_rate = 0.001\n[sampling]\nmax_tokens = 7\n"
    '[[env]]\nid = "e"\nargs = {judge_api_key = "secret"}\n'
    '[mlflow]\nexperiment = "other"\n[wandb]\nproject = "p"\n'
)
RUN = Run(run_id="demo.1", submitted_at_ms=1_700_000_000_123, config_toml=TEXT)
#: As `id_of` has it (test_cli_wandb.py).
RUN_ID = "demo-1-loyw3v5n"
ENDING = Ending(0, {"phase": "completed", "reward_after": 0.9, "ledger": {"trained": 8}})
NEEDED = 'model = "m"\n[[env]]\nid = "e"\n'
THEIRS = NEEDED + '[mlflow]\nexperiment = "theirs"\ntags = {a = "b"}\n'


@pytest.fixture(scope="module")
def library() -> None:
    """Read from the disk once: a process that does that, and is to end as soon as it has begun, has no more
    than FINISH_SECONDS for both. Of a real run it began when the run did."""
    subprocess.run([sys.executable, "-c", "import mlflow"], check=True)


@pytest.fixture
def store(library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty one, and nothing of this machine's own settings of MLflow."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    return f"file://{tmp_path / 'store'}"


def history() -> list[WatchRunResponse]:
    """A whole run, with an evaluation that is told after a later step."""
    kinds: list[dict[str, Any]] = [{"phase": PhaseEvent(run=RUN)}]
    kinds.append({"eval": EvalEvent(step=0, policy_version=0, metrics={"eval/reward": 0.4})})
    for step in range(1, STEPS + 1):
        ledger = Ledger(dispatched=step * 4, trained=step * 3, discarded={"failed": step})
        metrics = {"train/reward": 0.2 * step, "env/a@b/reward": 0.1 * step}
        metrics |= {"rewards/judge": 0.3, "rewards/judge/clarity": 0.4}
        kinds.append({"step": StepEvent(step=step, metrics=metrics, ledger=ledger)})
    kinds.append({"eval": EvalEvent(step=STEPS - 1, policy_version=3, metrics={"eval/reward": 0.9})})
    return [
        WatchRunResponse(event=number, at_ms=1000 * number, **kind)
        for number, kind in enumerate(kinds, start=1)
    ]


def record(folder: Path, events: list[WatchRunResponse]) -> None:
    outputs = Outputs(folder)
    for event in events:
        outputs.record(event)


def place(store: str, **more: Any) -> Mlflow:
    return Mlflow(MlflowConfig(experiment="mine", tracking_uri=store, **more))


def log_of(folder: Path) -> str:
    file = folder / "logs/mlflow.log"
    return file.read_text() if file.exists() else ""


def told(folder: Path, where: Mlflow, ending: Ending = ENDING, *, run: Run = RUN) -> str:
    with reporting(where, folder, print) as reporter:
        reporter.begin(run)
        return reporter.finish(ending)


def runs_in(store: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def charted(store: str, name: str) -> list[tuple[int, float, int]]:
    from mlflow import MlflowClient

    (run,) = runs_in(store)
    history = MlflowClient(store).get_metric_history(run.info.run_id, name)
    return [(one.step, one.value, one.timestamp) for one in history]


def test_everything_of_a_run_is_there(tmp_path: Path, store: str) -> None:
    """Promise 3."""
    folder = tmp_path / "run"
    record(folder, history())
    said = told(folder, place(store, name="first", tags={"team": "a"}))
    assert said == f"MLflow: {store}", (folder / "logs/mlflow.log").read_text()
    (run,) = runs_in(store)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.params == {
        "run_id": "demo.1",
        "learning_rate": "0.001",
        "sampling.max_tokens": "7",
        "env.0.id": "e",
        "env.0.args.judge_api_key": "(withheld)",
    }
    assert charted(store, "train/reward") == [
        (row["step"], row["train/reward"], int(1000 * row["time"]))
        for row in recover_lines(folder / "metrics.jsonl")
        if "train/reward" in row
    ]
    assert [(step, value) for step, value, _ in charted(store, "eval/reward")] == [(0, 0.4), (3, 0.9)]
    assert [value for _, value, _ in charted(store, "ledger/discarded/failed")] == [1, 2, 3, 4]
    assert len(charted(store, "env/a_b/reward")) == STEPS, "a name that MLflow does not take"
    assert "step" not in run.data.metrics
    assert (run.data.metrics["rewards/judge"], run.data.metrics["rewards/judge_clarity"]) == (0.3, 0.4)
    tags = run.data.tags
    assert tags["team"] == "a" and tags["mlflow.source.name"] == "quartet"
    assert tags["summary.reward_after"] == "0.9" and tags["summary.ledger.trained"] == "8"
    assert tags[IDENTITY] == RUN_ID and tags[SENT] == str(len(history()))


def test_no_point_is_doubled_or_lost_by_the_next_reporter(tmp_path: Path, store: str) -> None:
    """Promises 1 and 2, wherever the one before was stopped; and a setting that changed is told as it was
    first."""
    folder, events = tmp_path / "run", history()
    for begun, cut in itertools.pairwise((0, 1, 3, 6)):
        record(folder, events[begun:cut])
        told(folder, place(store), Ending(STOPPED_CODE, {}))
        assert [run.info.status for run in runs_in(store)] == ["KILLED"]
    record(folder, events[6:])
    changed = Run(
        run_id=RUN.run_id, submitted_at_ms=RUN.submitted_at_ms, config_toml=TEXT.replace("0.001", "0.1")
    )
    told(folder, place(store), Ending(1, {}), run=changed)
    (run,) = runs_in(store)
    assert run.info.status == "FAILED" and run.data.params["learning_rate"] == "0.001"
    elsewhere = tmp_path / "elsewhere"
    record(elsewhere, history())
    told(elsewhere, place(store))
    with reporting(place(store), folder, print) as reporter:
        assert "MLflow" in reporter.catch_up(RUN.run_id, TEXT, ENDING)
    (run,) = runs_in(store)
    assert run.info.status == "FINISHED"
    assert [step for step, _, _ in charted(store, "train/reward")] == [1, 2, 3, 4]
    assert [step for step, _, _ in charted(store, "eval/reward")] == [0, 3]


def test_a_process_that_is_killed_is_started_again(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the run goes on; what the server has is not sent again."""
    monkeypatch.setattr(reporting_module, "FIRST_WAIT_SECONDS", 0.1)
    folder, said = tmp_path / "run", list[str]()
    record(folder, history()[:3])
    with reporting(place(store), folder, said.append) as reporter:
        reporter.begin(RUN)
        deadline = time.monotonic() + 60
        while not (reporter._where and charted(store, "train/reward")):
            assert time.monotonic() < deadline, said
            reporter.tick()
            time.sleep(0.05)
        assert reporter._child is not None
        os.kill(reporter._child._process.pid, signal.SIGKILL)
        while not any("takes nothing now" in line for line in said):
            assert time.monotonic() < deadline, said
            reporter.tick()
            time.sleep(0.05)
        record(folder, history()[3:])
        while len(charted(store, "train/reward")) < STEPS:
            assert time.monotonic() < deadline, said
            reporter.tick()
            time.sleep(0.05)
        reporter.finish(ENDING)
    assert [step for step, _, _ in charted(store, "train/reward")] == [1, 2, 3, 4]


def test_what_is_sent_at_once_is_no_more_than_mlflow_takes_in_whole_points() -> None:
    """Promise 2."""

    def point(number: int, values: int) -> Point:
        return Point(number, 1.5, 7, {"step": 7.0} | {f"m{i}": 1.0 for i in range(values)}, False)

    sent = [(len(values), last) for values, last in parts(point(number, 400) for number in (1, 2, 4, 5))]
    assert sent == [(800, 2), (800, 5)]
    assert MAX_METRICS + 1 <= 1000, "SENT is one of what goes into one request"
    assert list(parts([])) == []
    assert list(parts([point(3, 1)])) == [([("m0", 1.0, 1500, 7)], 3)]
    assert list(parts([point(3, 0)])) == [([], 3)], "an event without a number was told, too"
    ((values, last),) = parts([point(6, MAX_METRICS + 5)])
    assert (len(values), last) == (MAX_METRICS, 6)


def test_several_are_told_to_end_before_any_is_waited_for(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run that ends may take (FINISH_SECONDS) is not taken once for each."""
    order: list[str] = []

    def noted(name: str) -> Any:
        method = getattr(Process, name)

        def call(*args: Any) -> Any:
            order.append(name)
            return method(*args)

        return call

    for name in ("end", "finish"):
        monkeypatch.setattr(Process, name, noted(name))
    record(tmp_path / "run", history())
    shown = Shown(mlflow=place(store).config, wandb=WandbConfig(project="p", mode="offline"))
    with reporting_everywhere(shown, tmp_path / "run", print) as reporters:
        reporters.begin(RUN)
        said = reporters.finish(ENDING)
    assert order == ["end", "end", "finish", "finish"]
    assert "MLflow: file://" in said and "wandb sync" in said
    assert [step for step, _, _ in charted(store, "train/reward")] == [1, 2, 3, 4]


def test_a_request_that_says_how_far_it_goes_has_all_up_to_there(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 2, below the client, which makes several requests of one that is too large."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    client = MlflowClient(store)
    run = Logged(client, place(store).plan(Path("/out"), RUN, here=True))
    requests: list[tuple[int, str]] = []
    inner = client._tracking_client.store.log_batch

    def noted(run_id: str, metrics: Any, params: Any, tags: Any) -> None:
        requests.append((max((metric.step for metric in metrics), default=0), "".join(t.value for t in tags)))
        inner(run_id, metrics=metrics, params=params, tags=tags)

    monkeypatch.setattr(client._tracking_client.store, "log_batch", noted)
    run.send([Point(number, 1.0, number, {"a": 1.0, "b": 2.0}, False) for number in range(1, 501)])
    assert requests == [(499, "499"), (500, "500")]
    assert len(charted(store, "a")) == len(charted(store, "b")) == 500
    assert Logged(client, place(store).plan(Path("/out"), RUN, here=True)).sent == 500


def test_no_password_of_an_address_is_told(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Promise 3."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:p@s3cret@127.0.0.1:9")
    folder = tmp_path / "run"
    record(folder, history())
    said = told(folder, Mlflow(MlflowConfig(experiment="mine")))
    assert "has not everything" in said and "127.0.0.1" in said + log_of(folder)
    files = [file.read_text() for file in folder.rglob("*") if file.is_file()]
    assert "s3cret" not in "".join([said, *files, *capfd.readouterr()])


def test_an_experiment_that_was_deleted_is_said_to_be(tmp_path: Path, store: str) -> None:
    from mlflow import MlflowClient

    folder = tmp_path / "run"
    record(folder, history())
    told(folder, place(store))
    experiment = MlflowClient(store).get_experiment_by_name("mine")
    assert experiment is not None
    MlflowClient(store).delete_experiment(experiment.experiment_id)
    assert "'mine' was deleted there; restore it, or name another" in told(folder, place(store))


@pytest.mark.parametrize("name", ["a//b", "/a", "a/", "a/../b", "./a", "..", ".", "", "a b:c/d", "ü@,"])
def test_names_are_such_as_mlflow_takes(name: str) -> None:
    from mlflow.utils import validation

    validate: Any = validation._validate_metric_name
    validate(named(name))
    assert named("env/a@b/reward") == "env/a_b/reward" and named(named(name)) == named(name)


def test_no_name_is_the_folder_of_another() -> None:
    """Promise 4, also of what an earlier process told."""
    names = ["a", "b/c", "a/x", "b", "a/x/y", "b/c/d", "b/e", "a"]
    apart = Apart([])
    told = [apart.named(name) for name in names]
    assert told == ["a", "b/c", "a_x", "b_", "a_x_y", "b/c_d", "b/e", "a"]
    assert [Apart(told).named(name) for name in names] == told


def test_how_settings_and_addresses_are_told() -> None:
    assert flat({"a": {"b": [1, {"c": None, "d": True}]}, "e@f": "x" * 7000}) == {
        "a.b.0": "1",
        "a.b.1.d": "True",
        "e_f": "x" * 6000,
    }
    assert address_of("https://u:p@w@host:5000/", "1", "r") == "https://host:5000/#/experiments/1/runs/r"
    assert address_of("databricks", "1", "r") == "databricks"


def test_what_is_missing_is_refused_before_anything_starts(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(MlflowConfig())
    with pytest.raises(
        ConfigError, match=r"nobody says where; set mlflow\.tracking_uri .*MLFLOW_TRACKING_URI"
    ):
        check(MlflowConfig(experiment="mine"))
    with pytest.raises(ConfigError, match=r"refuses mlflow\.tracking_uri \(.*ftp.*http://HOST:5000"):
        check(MlflowConfig(experiment="mine", tracking_uri="ftp://x"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "ftp://me:secret@x")
    with pytest.raises(ConfigError, match="refuses the variable MLFLOW_TRACKING_URI") as caught:
        check(MlflowConfig(experiment="mine"))
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    check(MlflowConfig(experiment="mine"))  # and asks nobody: nobody answers there
    blocked = 'raise ModuleNotFoundError("No module named \'mlflow\'", name="mlflow")'
    (tmp_path / "mlflow.py").write_text(blocked)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError, match=r"mlflow is not installed; .* pip install './sdk\[mlflow\]'"):
        check(MlflowConfig(experiment="mine"))


def test_an_outage_ends_nothing_and_is_said_once(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = tmp_path / "run", list[str]()
    record(folder, history())
    with monkeypatch.context() as patched:
        patched.setattr(reporting_module, "FINISH_SECONDS", 3.0)
        patched.setattr(reporting_module, "FIRST_WAIT_SECONDS", 0.1)
        patched.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with reporting(place("http://127.0.0.1:9"), folder, said.append) as reporter:
            reporter.begin(RUN)
            deadline = time.monotonic() + 60
            while reporter._wait_seconds < 0.4:  # it was tried twice
                assert time.monotonic() < deadline
                reporter.tick()
                time.sleep(0.05)
            assert len(said) == 1 and "MLflow takes nothing now" in said[0]
            last = reporter.finish(ENDING)
            assert "MLflow has not everything" in last and last.endswith("by the same command with --resume")
        with reporting(place("http://127.0.0.1:9"), folder, print, here=False) as watching:
            watching.begin(RUN)
            assert watching.finish(ENDING).endswith("reported again, by the same command")
    with reporting(place(store), folder, said.append, here=False) as watching:
        watching.begin(RUN)
        assert watching.finish(ENDING) == f"MLflow: {store}"
        assert len(said) == 1, "what is said at the end is not said just before it"
    assert told(folder, place(store)) == f"MLflow: {store}"
    assert len(charted(store, "train/reward")) == STEPS


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ('name = "x"', "mlflow.name is set, and mlflow.experiment is not; set it to a name"),
        ('experiment = ""', "mlflow.experiment"),
        ('experiment = "a"\ntracking_uri = "http://u:p@h"', "MLFLOW_TRACKING_USERNAME"),
        ('experiment = "a"\ntags = {a = 1}', "mlflow.tags.a"),
        ('experiment = "a"\ntags = {"a,b" = "x"}', "write 'a_b'"),
        ('experiment = "a"\ntags = {"a//b" = "x"}', "no name for MLflow; write 'a_/b'"),
        ('experiment = "a"\ntags = {"quartet.run" = "x"}', "begin with 'quartet.' tell which run it is"),
        ('experimant = "a"', "unknown key 'mlflow.experimant'; did you mean 'mlflow.experiment'"),
    ],
)
def test_refusals(table: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_run(f"{NEEDED}[mlflow]\n{table}\n")


def test_it_is_no_part_of_the_run_and_goes_along_for_who_watches() -> None:
    plain, shown = (
        parse_run(NEEDED),
        parse_run(THEIRS),
    )
    assert plain != shown and is_same_run(plain, shown)
    assert "mlflow" in _not_sent(plain) and "mlflow" not in _not_sent(shown)
    run = Run(run_id="r", config_toml=THEIRS)
    assert shown_as(run, []).mlflow == MlflowConfig(), "only where somebody asks"
    assert shown_as(run, [], mlflow=True).mlflow == shown.mlflow
    mine = shown_as(run, ["--mlflow.experiment", "mine"]).mlflow
    assert mine == MlflowConfig(experiment="mine", tags={"a": "b"})
    with pytest.raises(ConfigError, match=r"names no experiment of MLflow; add --mlflow\.experiment NAME"):
        shown_as(Run(run_id="r", config_toml=NEEDED), [], mlflow=True)


def test_a_plan_is_read_as_it_was_written(store: str) -> None:
    plan = place(store).plan(Path("/out"), RUN, here=True)
    assert Plan(**json.loads(json.dumps(vars(plan)))) == plan
    assert plan.run_id == RUN_ID and plan.folder == "/out"
