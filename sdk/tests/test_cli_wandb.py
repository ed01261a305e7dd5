"""A run in Weights & Biases, by the real library: offline, read back from the file that it writes, and
online, against a server of its protocol that can be away, be slow, and come back."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import wandb_file
from quartet.cli.elsewhere import process as process_module
from quartet.cli.elsewhere import reporter as reporting_module
from quartet.cli.elsewhere.child import Ending, Instructions, Told
from quartet.cli.elsewhere.identity import id_of
from quartet.cli.elsewhere.reporter import Reporter
from quartet.cli.elsewhere.reporter import reporting as reporting_to
from quartet.cli.outputs import Outputs, recover_lines
from quartet.cli.wandb.child import INIT_SECONDS
from quartet.cli.wandb.place import WeightsAndBiases, check
from quartet.config import ConfigError
from quartet.run.wandb import WandbConfig
from quartet.v1.common_pb2 import Message
from quartet.v1.orchestrator_service_pb2 import (
    EvalEvent,
    Ledger,
    PhaseEvent,
    RolloutEvent,
    Run,
    StepEvent,
    WatchRunResponse,
)
from quartet.v1.rollout_pb2 import FAILURE_KIND_TIMEOUT, Rollout, RolloutFailure
from wandb_server import Server

STEPS = 4
RUN = Run(
    run_id="demo.1",
    submitted_at_ms=1_700_000_000_123,
    config_toml='learning_rate = 0.001\n[sampling]\nmax_tokens = 7\n[wandb]\nproject = "other"\n',
)
ENDING = Ending(0, {"phase": "completed", "reward_after": 0.9, "ledger": {"trained": 8}})
OFFLINE = WandbConfig(project="p", mode="offline", completions=2, completions_interval=3)
ONLINE = WandbConfig(project="p", entity="me", mode="online", completions=0)


def rollout(step: int | None, member: int) -> RolloutEvent:
    said = Message(role="assistant", content=f"answer {member} of {step}")
    event = RolloutEvent(
        group=1,
        env_id="reverse-text",
        task_index=5,
        step=step,
        rollout=Rollout(
            member=member, reward=0.25, messages=[Message(role="user", content="abc"), said], num_turns=1
        ),
    )
    if member == 0:
        event.rollout.failure.CopyFrom(RolloutFailure(kind=FAILURE_KIND_TIMEOUT, message="late"))
    return event


def history() -> list[WatchRunResponse]:
    """A whole run, with an evaluation that is told after a later step."""
    kinds: list[dict[str, object]] = [{"phase": PhaseEvent(run=RUN)}, {"rollout": rollout(None, 1)}]
    kinds.append({"eval": EvalEvent(step=0, policy_version=0, metrics={"eval/reward": 0.4})})
    for step in range(1, STEPS + 1):
        kinds += [{"rollout": rollout(step, member)} for member in range(4)]
        ledger = Ledger(dispatched=step * 4, trained=step * 3, discarded={"failed": step})
        metrics = {"train/reward": 0.2 * step, "train/loss": 0.01, "tokens_per_second": 5.0}
        kinds.append({"step": StepEvent(step=step, metrics=metrics, ledger=ledger)})
    kinds.append({"eval": EvalEvent(step=STEPS - 1, policy_version=3, metrics={"eval/reward": 0.9})})
    return [
        WatchRunResponse(event=number, at_ms=1000 * number, **kind)  # type: ignore[arg-type]
        for number, kind in enumerate(kinds, start=1)
    ]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, and nothing of this machine's own settings of wandb."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(home))
    return home


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    yield server
    server.close()


def reporting(
    config: WandbConfig, folder: Path, say: Callable[[str], None], *, here: bool = True
) -> AbstractContextManager[Reporter]:
    return reporting_to(WeightsAndBiases(config), folder, say, here=here)


def record(folder: Path, events: list[WatchRunResponse]) -> None:
    outputs = Outputs(folder)
    for event in events:
        outputs.record(event)


def metrics_of(folder: Path) -> list[dict[str, object]]:
    return recover_lines(folder / "metrics.jsonl")


def wait_for(reporter: Reporter, said: list[str], text: str) -> None:
    deadline = time.monotonic() + 60
    while not any(text in line for line in said):
        assert time.monotonic() < deadline, said
        reporter.tick()
        time.sleep(0.05)


def log_of(folder: Path) -> str:
    return (folder / "logs/wandb.log").read_text()


def offline_file(folder: Path) -> wandb_file.Written:
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return wandb_file.read(file)


def test_everything_of_a_run_is_there(tmp_path: Path, home: Path) -> None:
    folder, said = tmp_path / "run", list[str]()
    config = OFFLINE.model_copy(update={"tags": ("a", "b"), "group": "g", "entity": "e"})
    with reporting(config, folder, said.append) as reporter:
        record(folder, history()[:9])
        reporter.begin(RUN)
        record(folder, history()[9:])
        assert reporter.finish(ENDING).startswith("Weights & Biases: written down; wandb sync /"), log_of(
            folder
        )
    written = offline_file(folder)
    rows = metrics_of(folder)
    assert len(rows) == STEPS + 2
    assert [row["_step"] for row in written.history] == [row["event"] for row in rows]
    assert [row["_timestamp"] for row in written.history] == [row["time"] for row in rows]
    for logged, row in zip(written.history, rows, strict=True):
        for name in set(row) - {"event", "time", "ledger/discarded"}:
            assert logged[name] == row[name], name
    assert written.history[2]["ledger/discarded/failed"] == 2
    assert written.x_axes == {"step": "", "*": "step"}
    assert [row["step"] for row in written.history] == [0, 1, 2, 3, 4, 3], "the evaluation stands at its step"
    assert written.summary["phase"] == "completed" and written.summary["train/reward"] == 0.8
    assert written.config["learning_rate"] == 0.001 and written.config["sampling"] == {"max_tokens": 7}
    assert "wandb" not in written.config and written.exit_code == 0
    assert written.run == {
        "run_id": "demo-1-loyw3v5n",
        "display_name": "demo.1",
        "project": "p",
        "entity": "e",
        "run_group": "g",
        "tags": ["a", "b"],
    }
    assert list(home.iterdir()) == [], "nothing is left outside of the output folder"


def test_conversations_go_along_as_tables(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    record(folder, history())
    with reporting(OFFLINE, folder, print) as reporter:
        reporter.begin(RUN)
        reporter.finish(ENDING)
    (files,) = folder.glob("wandb/offline-run-*/files")
    tables = {
        row["_step"]: json.loads((files / row[f"{name}/path"]).read_text())
        for row in offline_file(folder).history
        for name in ("completions", "eval/completions")
        if f"{name}/path" in row
    }
    assert [table["data"][0][0] for table in tables.values()] == [0, 1, 3], "the first step and every third"
    assert tables[8]["columns"] == ["step", "env", "task", "reward", "prompt", "completion"]
    assert tables[8]["data"] == [
        [1, "reverse-text", 5, 0.25, "abc", "answer 1 of 1"],
        [1, "reverse-text", 5, 0.25, "abc", "answer 2 of 1"],
    ], "two, and none that failed"


def test_offline_the_newest_folder_has_all(tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", history()
    for begun, cut in itertools.pairwise((0, 3, 9, len(whole))):
        record(folder, whole[begun:cut])
        with reporting(OFFLINE, folder, print) as reporter:
            reporter.begin(RUN)
            reporter.finish(ENDING)
        steps = [row["_step"] for row in offline_file(folder).history]
        assert steps == [row["event"] for row in metrics_of(folder)]
        time.sleep(1.1)  # the library names folders by the second


def test_online_no_point_is_doubled_or_lost_by_a_second_reporter(tmp_path: Path, server: Server) -> None:
    folder = tmp_path / "run"
    for events in (history()[:9], history()[9:]):
        record(folder, events)
        with reporting(ONLINE, folder, print) as reporter:
            reporter.begin(RUN)
            assert reporter.finish(ENDING) == f"Weights & Biases: {server.url}/me/p/runs/demo-1-loyw3v5n"
    elsewhere = tmp_path / "elsewhere"
    record(elsewhere, history())
    with reporting(ONLINE, elsewhere, print, here=False) as reporter:
        reporter.begin(RUN)
        reporter.finish(ENDING)
    assert server.steps("demo-1-loyw3v5n") == [row["event"] for row in metrics_of(folder)]
    assert server.offset_errors == []


def test_a_library_that_is_killed_is_started_again(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting_module, "FIRST_WAIT_SECONDS", 0.1)
    folder, said = tmp_path / "run", list[str]()
    record(folder, history()[:9])
    with reporting(ONLINE, folder, said.append) as reporter:
        reporter.begin(RUN)
        wait_for(reporter, said, server.url)
        assert reporter._child is not None
        os.kill(reporter._child._process.pid, signal.SIGKILL)
        wait_for(reporter, said, "takes nothing now")
        wait_for(reporter, said, "is reached again")
        record(folder, history()[9:])
        assert server.url in reporter.finish(ENDING), log_of(folder)
    assert server.steps("demo-1-loyw3v5n") == [row["event"] for row in metrics_of(folder)]
    assert len(said) == 3, said


def test_an_outage_is_said_once_and_what_is_missing_comes_later(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting_module, "FINISH_SECONDS", 3.0)
    folder, said = tmp_path / "run", list[str]()
    record(folder, history()[:9])
    with reporting(ONLINE, folder, said.append) as reporter:
        reporter.begin(RUN)
        wait_for(reporter, said, server.url)
        server.away = True
        record(folder, history()[9:])
        began = time.monotonic()
        assert "has not everything" in reporter.finish(ENDING)
        assert time.monotonic() - began < 60, "bounded"
    assert len(metrics_of(folder)) == STEPS + 2
    server.away = False
    with reporting(ONLINE, folder, said.append) as reporter:
        assert server.url in reporter.catch_up(RUN.run_id, RUN.config_toml, ENDING), log_of(folder)
    assert server.steps("demo-1-loyw3v5n") == [row["event"] for row in metrics_of(folder)]
    assert server.summary("demo-1-loyw3v5n")["phase"] == "completed"


def test_a_server_that_never_answers_delays_nothing(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting_module, "FINISH_SECONDS", 2.0)
    server.hanging = True
    folder = tmp_path / "run"
    record(folder, history())
    with reporting(ONLINE, folder, print) as reporter:
        began = time.monotonic()
        reporter.begin(RUN)
        child = reporter._child
        for _ in range(100):
            reporter.tick()
        assert time.monotonic() - began < INIT_SECONDS / 2, "the library would wait so long"
        assert server.asked.wait(60)
        began = time.monotonic()
        assert "has not everything: it took longer than 2 s" in reporter.finish(ENDING)
        assert time.monotonic() - began < INIT_SECONDS
    assert child is not None and child._process.poll() is not None, "nothing goes on behind it"


def test_it_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "QUIET_SECONDS", 60.0)  # the machine may be slow
    folder = tmp_path / "run"
    record(folder, history())
    said = list[str]()
    with reporting(OFFLINE, folder, said.append) as reporter:
        reporter.begin(RUN)
        wait_for(reporter, said, str(folder))
        reporter.finish(ENDING)
    assert capfd.readouterr() == ("", "")
    assert "wandb" in log_of(folder)


def test_it_does_not_outlive_who_started_it(tmp_path: Path) -> None:
    """A launcher that is killed cannot end it: the end of its stdin does."""
    folder = tmp_path / "run"
    record(folder, history())
    reporter = Reporter(WeightsAndBiases(OFFLINE), folder, print)
    reporter.begin(RUN)
    assert reporter._child is not None
    reporter._child._stdin.close()
    assert reporter._child._process.wait(30) == 0
    assert offline_file(folder).exit_code == 255, "killed, which can be gone on with"
    assert not Path(reporter._child._scratch).exists(), "it cleans up after itself"
    reporter._close()


def test_it_ends_in_time_also_where_nobody_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """elsewhere/child.py 1: with a launcher that is killed both ends of its pipes are gone."""
    reads, writes = os.pipe()
    os.close(reads)
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    out = io.TextIOWrapper(io.FileIO(writes, "w"), write_through=True)
    Instructions(io.StringIO(), 0.0, Told(out))
    assert ended.wait(30)


def test_without_a_project_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for config in (WandbConfig(), WandbConfig(project="p")):
        check(config)
        with reporting(config, tmp_path, print) as reporter:
            reporter.begin(RUN)
            reporter.tick()
            assert reporter.finish(ENDING) == ""
    assert not (tmp_path / "wandb").exists()


def test_what_is_missing_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = WandbConfig(project="p")
    with pytest.raises(ConfigError, match="no API key is found; run 'wandb login', set WANDB_API_KEY"):
        check(online)
    check(WandbConfig(project="p", mode="offline"))
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(ConfigError, match="API key must have"):
        check(online)
    monkeypatch.delenv("WANDB_API_KEY")
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine 127.0.0.1:9\n  login user\n  password {'b' * 40}\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(netrc))
    check(online)  # and asks nobody whether it is good: nobody answers there
    blocked = 'raise ModuleNotFoundError("No module named \'wandb\'", name="wandb")'
    (tmp_path / "wandb.py").write_text(blocked)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError, match=r"wandb is not installed; .* pip install './sdk\[wandb\]'"):
        check(WandbConfig(project="p", mode="offline"))


def test_ids_are_the_runs_own() -> None:
    assert id_of("a.b c", 1_700_000_000_123) == "a-b-c-loyw3v5n"
    assert id_of("a", 1_700_000_000_124) != id_of("a", 1_700_000_000_123), "a later run of that name"
    assert len(id_of("x" * 64, 2**63)) <= 64


def test_the_command_line_does_not_import_the_library() -> None:
    code = "import sys, quartet.cli.__main__ as m; m.build_parser(); sys.exit('wandb' in sys.modules)"
    assert subprocess.run([os.sys.executable, "-c", code], check=False).returncode == 0  # type: ignore[attr-defined]


def test_a_process_that_cannot_be_started_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = tmp_path / "run", list[str]()
    record(folder, history())
    (folder / "wandb").write_text("in the way")
    # Nor does a log that takes no word of it.
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True))
    monkeypatch.setattr(process_module, "QUIET_SECONDS", 0.0)
    with pytest.raises(EOFError), reporting(OFFLINE, folder, said.append) as reporter:
        reporter.begin(RUN)
        raise EOFError  # of the run
    said.clear()
    with reporting(OFFLINE, folder, said.append) as reporter:
        reporter.begin(RUN)
        reporter.tick()
        assert len(said) == 1 and "takes nothing now: its process cannot be started" in said[0]
        (folder / "wandb").unlink()
        assert "wandb sync" in reporter.finish(ENDING), "what was in the way is gone"
    assert len(offline_file(folder).history) == STEPS + 2
