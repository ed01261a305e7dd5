"""A run as a person follows it: on the terminal, in its files, in Prometheus and in Weights & Biases, also
over a Ctrl-C; and, of an orchestrator that is elsewhere, by `quartet watch`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from loopback import LOOPBACK
from quartet.cli.compare.folders import recorded
from quartet.local.ports import resolve

from tests.conftest import QUARTET, REPOSITORY
from tests.e2e.conftest import quartet
from tests.forked_services import Forks, Process, listening

STEPS = 14
STOP_AFTER = 4
RUN_SECONDS = 240
# Before the first test a run is begun, stopped and gone on with.
pytestmark = [pytest.mark.timeout(3 * RUN_SECONDS), pytest.mark.usefixtures("imported_once")]
STEP = re.compile(r'quartet_run_steps\{run="run"\} (\d+)')
NAMES = {
    "train/reward": "reward ",
    "train/loss": "loss ",
    "train/learning_rate": "lr ",
    "train/kl_divergence": "kl ",
    "rollout/mean_length": "length ",
    "rollout/generation_time": "seconds/rollout ",
}


@dataclass(frozen=True)
class Followed:
    """What was seen of a run that was stopped once and gone on with."""

    output: Path
    printed: str
    scraped: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.output)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def written_of(folder: Path) -> Any:
    """What the library wrote of the run; there is one folder of it, whatever happened to the run."""
    sys.path.insert(0, str(REPOSITORY / "sdk" / "tests"))
    import wandb_file

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return wandb_file.read(file)


def metrics_at(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        return ""


def launched(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def scraped_after(process: subprocess.Popen[str], address: str, step: int) -> str:
    """What Prometheus is told once so many steps are applied."""
    deadline = time.monotonic() + RUN_SECONDS
    while True:
        text = metrics_at(address)
        if (found := STEP.search(text)) and int(found[1]) >= step:
            return text
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate()[0])
        time.sleep(0.02)


@pytest.fixture(scope="module")
def followed(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Followed:
    output = tmp_path_factory.mktemp("monitoring") / "run"
    (address,) = resolve([f"{LOOPBACK}:0"])
    command = [*QUARTET, "rl", "@", "configs/reverse-text.toml", "--model", str(random_model)]
    command += ["--max-steps", str(STEPS), "--batch-size", "16", "--eval.num-examples", "8"]
    command += ["--eval.interval", "5", "--orchestrator.server.metrics-address", address]
    command += ["--output-dir", str(output), "--wandb.project", "mine", "--wandb.mode", "offline"]
    command += ["--wandb.completions-interval", "5", "--tensorboard.enabled", "true"]
    begun = launched(command)
    scraped = scraped_after(begun, address, STOP_AFTER)
    begun.send_signal(signal.SIGINT)
    printed = begun.communicate(timeout=RUN_SECONDS)[0]
    assert begun.returncode == 130, printed
    assert len(rows_of(output)) < STEPS, "it was stopped on the way"
    again = launched([*command, "--resume", "--wandb.project", "another", "--wandb.name", "again"])
    printed += again.communicate(timeout=RUN_SECONDS)[0]
    assert again.returncode == 0, printed
    return Followed(output, printed, scraped)


def test_the_terminal_tells_the_names_of_the_field_and_prints_completions(followed: Followed) -> None:
    steps = [line for line in followed.printed.splitlines() if f"/{STEPS}  reward" in line]
    assert len(steps) == STEPS
    assert all(word in line for line in steps for word in NAMES.values()), steps[0]
    assert sum("completion: " in line for line in followed.printed.splitlines()) == 2, "of steps 1 and 11"


def test_prometheus_has_the_names_of_the_field(followed: Followed) -> None:
    for name in NAMES:
        assert f'quartet_run_metric{{name="{name}",run="run"}} ' in followed.scraped


def test_tensorboard_has_every_line_once(followed: Followed) -> None:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    reader = EventAccumulator(str(followed.output / "tensorboard"), size_guidance={SCALARS: 0})
    reader.Reload()
    for name in ("train/loss", "train/reward", "tokens_per_second", "eval/reward"):
        wanted = [(row["time"], row["step"], row[name]) for row in followed.rows if name in row]
        found = [(one.wall_time, one.step, one.value) for one in reader.Scalars(name)]
        assert found == [pytest.approx(one) for one in wanted] and len(found) > 2, name
    assert f"TensorBoard: tensorboard --logdir {followed.output / 'tensorboard'}" in followed.printed


def test_weights_and_biases_has_every_line_once(followed: Followed) -> None:
    written = written_of(followed.output)
    rows = followed.rows
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, STEPS + 1))
    assert [row["_step"] for row in written.history] == [row["event"] for row in rows]
    for logged, row in zip(written.history, rows, strict=True):
        for name in set(row) - {"event", "time", "ledger/discarded"}:
            assert logged[name] == row[name], name
    assert set(NAMES) <= set(written.history[-2])
    assert (written.run["project"], written.run["display_name"]) == ("another", "again")
    assert written.config["batch_size"] == 16 and written.summary["phase"] == "completed"
    assert {row["step"] for row in written.history if "completions/path" in row} == {1, 5, 10}
    assert "wandb sync" in followed.printed and "wandb:" not in followed.printed


@contextmanager
def started(
    forks: Forks, output: Path, name: str, *python: str, keys: Sequence[str] = ()
) -> Iterator[Process]:
    """A service of the run's, alone and by hand, or by this Python: its process, once it listens."""
    port_file, log = output / "data" / f"{name}.port", output.parent / f"{name}.log"
    port_file.unlink(missing_ok=True)
    words = ["@", str(output / "config" / f"{name}.toml"), *keys]
    if python:
        with log.open("wb") as out:
            command = [sys.executable, *python, *words]
            service: Process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out)
    else:
        service = forks.start(name, words, log)
    with listening(service, log, port_file):
        yield service


def elsewhere(output: Path) -> list[str | Path]:
    """How its orchestrator is spoken to."""
    address = (output / "data" / "orchestrator.port").read_text().strip()
    return ["--orchestrator", address, "--token-file", output / "data" / "token"]


def test_a_run_that_is_elsewhere_is_recorded_and_reported_by_who_watches(
    followed: Followed, forks: Forks
) -> None:
    there = followed.output.parent / "watched"
    with started(forks, followed.output, "orchestrator"):
        watch = ["watch", "run", *elsewhere(followed.output), "--output-dir", there]
        for _ in range(2):
            done = quartet(*watch, "--wandb.project", "mine", "--wandb.mode", "offline")
            assert done.returncode == 0 and "wandb sync" in done.stdout, done.stdout + done.stderr
        other = quartet(*watch[:-1], followed.output, "--wandb.project", "mine", "--wandb.mode", "offline")
        assert other.returncode == 2 and "holds something else than the run 'run'" in other.stderr
    assert rows_of(there) == followed.rows, "once, and also what was before the stop"
    ends = [recorded(folder).end for folder in (followed.output, there)]
    for key in ("phase", "steps", "reward_before", "reward_after", "ledger"):
        assert ends[0][key] == ends[1][key] is not None, key
    written = written_of(there)
    assert [row["_step"] for row in written.history] == [row["event"] for row in followed.rows]
    assert written.run["run_id"] == written_of(followed.output).run["run_id"]
    names = {file.name for file in (followed.output / "rollouts").iterdir()}
    assert {file.name for file in (there / "rollouts").iterdir()} == names


#: A trainer that stops where it has sent the first chunk of a file that has several.
PAUSING = """
import pathlib, runpy, time
from quartet_trainer.exported import ExportedModel
original = ExportedModel.chunk
def chunk(model, file, begin, end):
    if begin:
        pathlib.Path({paused!r}).touch()
        time.sleep(600)
    return original(model, file, begin, end)
ExportedModel.chunk = chunk
runpy.run_module("quartet_trainer", run_name="__main__")
"""


def test_the_model_of_a_run_that_is_elsewhere_is_fetched_over_the_death_of_its_trainer(
    followed: Followed, forks: Forks
) -> None:
    output, target = followed.output, followed.output.parent / "fetched"
    paused, token = output.parent / "paused", ["--security.token_file", str(output / "data" / "token")]
    with started(forks, output, "orchestrator", keys=token):
        export = [*QUARTET, "export", "run", str(target), *map(str, elsewhere(output))]
        with started(forks, output, "trainer", "-c", PAUSING.format(paused=str(paused))) as trainer:
            fetching = launched(export)
            while not paused.exists():
                assert fetching.poll() is None, fetching.communicate()[0]
                time.sleep(0.02)
            trainer.kill()
        assert not target.exists()
        with started(forks, output, "trainer"):
            said = fetching.communicate(timeout=RUN_SECONDS)[0]
    assert fetching.returncode == 0, said
    assert f"broken off, goes on from byte {1 << 20} of model.safetensors: the trainer at" in said
    assert f"{target}: the model of state final, policy version {STEPS}" in said

    def contents(folder: Path) -> dict[str, bytes]:
        files = (file for file in folder.rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}

    assert contents(target) == contents(output / "checkpoint")


def test_a_run_that_is_over_is_reported_again_where_that_is_asked_for(followed: Followed) -> None:
    record = json.loads((followed.output / "run.json").read_text())
    config = followed.output.parent / "run.toml"
    config.write_text(record["config_toml"])
    folder = ["--output-dir", followed.output, "--resume"]
    done = quartet("rl", "@", config, *folder, "--wandb.project", "late", "--wandb.mode", "offline")
    assert done.returncode == 0 and "wandb sync" in done.stdout, done.stdout + done.stderr
    written = written_of(followed.output)
    assert written.run["project"] == "late"
    assert [row["_step"] for row in written.history] == [row["event"] for row in followed.rows]
