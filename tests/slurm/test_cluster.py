"""Jobs of `quartet slurm` under a real SLURM (cluster.py): its signals, its queue, its steps.

A small program is in the place of `quartet rl` and `quartet node` (sdk/tests/queued_run.py), which treats
signals as these do. The real ones: test_runs.py.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.slurm.script import Queued, script_of
from quartet.run.slurm import SlurmConfig

from tests.conftest import REPOSITORY
from tests.slurm.cluster import Cluster, until

pytestmark = pytest.mark.slow

STAND_IN = [sys.executable, str(REPOSITORY / "sdk" / "tests" / "queued_run.py")]
OURS = shlex.join([sys.executable, "-m", "quartet.cli"])
#: sbatch counts time limits in minutes, and looks at them every half minute.
LIMIT_MINUTES = 2
LIMIT_SECONDS = 60.0 * LIMIT_MINUTES
STOP_SECONDS = 60


@dataclass
class Job:
    """A run that was queued."""

    cluster: Cluster
    folder: Path
    number: str = ""

    @property
    def log(self) -> str:
        """What it said."""
        file = Path(f"{self.folder}.slurm/{self.number}.log")
        return file.read_text() if file.exists() else ""

    def of(self, key: str) -> list[Any]:
        """What the stand-ins noted under a key."""
        file = Path(f"{self.folder}.noted")
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line[key] for line in lines if key in line]

    def until_steps(self, count: int) -> None:
        """Wait for so many."""
        metrics = self.folder / "metrics.jsonl"
        until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= count,
            60,
            f"{count} steps",
            lambda: self.log,
        )

    def ends(self, seconds: float = 60) -> dict[str, str]:
        """Wait for its end: what SLURM knows of it then."""
        until(lambda: self.state["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), seconds, "its end")
        return self.state

    @property
    def state(self) -> dict[str, str]:
        """What SLURM knows of it."""
        return self.cluster.state(self.number)


def queued(
    cluster: Cluster,
    folder: Path,
    *,
    machines: int = 1,
    begin: Any = "",
    slurm: SlurmConfig,
    **variables: str,
) -> Job:
    """A job whose run is the stand-in's."""
    run = Queued("r", folder, folder.parent, machines, None, begin)
    run.beside.mkdir(parents=True)
    (run.beside / "run.toml").touch()
    script = script_of(run, slurm)
    assert script.count(f"quartet=({OURS})") == 1
    script = script.replace(f"quartet=({OURS})", f"quartet=({shlex.join(STAND_IN)})")
    file = run.beside / "job.sh"
    file.write_text(script)
    given = [f"{name}={value}" for name, value in variables.items()]
    return Job(cluster, folder, cluster.call("env", *given, "sbatch", "--parsable", str(file)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run; its name is none that a shell or sbatch would leave alone."""
    return tmp_path / "o u t" / "50% first"


def test_a_run_over_three_machines_is_completed(slurm: Cluster, folder: Path) -> None:
    setup = ("export SHOWN=yes",)
    options = ("--comment=a b",)
    job = queued(
        slurm, folder, machines=3, slurm=SlurmConfig(setup=setup, options=options), QUEUED_RUN_STEPS="3"
    )
    state = job.ends()
    assert state["JobState"] == "COMPLETED", job.log
    assert state["ExitCode"] == "0:0"
    assert state["JobName"] == "50--first"
    (words,) = job.of("rl")
    assert words[words.index("--hosts") + 1] == ",".join(slurm.names)
    assert sorted(job.of("node")) == slurm.names[1:]
    assert job.of("shown") == ["yes"]


def test_near_its_time_limit_a_run_stops_is_queued_again_and_goes_on(slurm: Cluster, folder: Path) -> None:
    config = SlurmConfig(time=LIMIT_MINUTES, stop_seconds=STOP_SECONDS)
    job = queued(slurm, folder, machines=2, slurm=config, QUEUED_RUN_STEPS="350", MINE="yes")
    job.until_steps(1)
    began = time.monotonic()
    until(lambda: "stopped" in job.of("ended"), LIMIT_SECONDS, "the stop", lambda: job.log)
    after = time.monotonic() - began
    assert after <= LIMIT_SECONDS - STOP_SECONDS + 15, "it may be a minute early, and no later"
    state = job.ends(180)
    assert state["JobState"] == "COMPLETED", job.log
    assert state["Restarts"] == "1"
    first, second = job.of("rl")
    assert "--resume" not in first
    assert "--resume" in second
    assert job.of("ended") == ["stopped", "completed"]
    assert not job.of("killed")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 350
    assert "the job is queued again, and goes on" in job.log
    assert "started 1 times before" in job.log


def test_scancel_lets_a_run_stop_in_order(slurm: Cluster, folder: Path) -> None:
    """It sends SIGTERM to all processes of the job at once, and the script passes it on."""
    job = queued(slurm, folder, machines=2, slurm=SlurmConfig(), QUEUED_RUN_STOP="3")
    job.until_steps(2)
    slurm.call("scancel", job.number)
    state = job.ends()
    until(lambda: bool(job.of("ended")), 30, "the stop", lambda: job.log)
    assert state["JobState"] == "CANCELLED", job.log
    assert job.of("ended") == ["stopped"]
    assert not job.of("killed")
    assert "SIGTERM" in job.of("signal"), "SLURM's own"


def test_the_batch_script_alone_can_be_told_to_stop(slurm: Cluster, folder: Path) -> None:
    job = queued(slurm, folder, machines=2, slurm=SlurmConfig(), QUEUED_RUN_STOP="3")
    job.until_steps(2)
    slurm.call("scancel", "--batch", "--signal=TERM", job.number)
    state = job.ends()
    assert state["JobState"] == "FAILED", job.log
    assert state["ExitCode"] == "130:0"
    assert state["Restarts"] == "0"
    assert job.of("ended") == ["stopped"]
    assert job.of("signal") == ["SIGHUP"], "and nothing of SLURM's own"


def test_a_machine_whose_part_fails_ends_the_job(slurm: Cluster, folder: Path) -> None:
    job = queued(slurm, folder, machines=3, slurm=SlurmConfig(), QUEUED_RUN_FAILS=slurm.names[2])
    state = job.ends()
    assert state["JobState"] == "FAILED", job.log
    assert state["ExitCode"] == "1:0"
    assert job.of("ended") == ["stopped"]
    assert "the part of another machine ended before the run" in job.log


def test_a_job_whose_machine_fails_is_started_again_and_goes_on(slurm: Cluster, folder: Path) -> None:
    """--overwrite is for the run that was there when the job was queued."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    os.utime(folder / "run.json", (0, 0))
    job = queued(slurm, folder, machines=2, begin="--overwrite", slurm=SlurmConfig(), QUEUED_RUN_STEPS="60")
    job.until_steps(2)
    # Whose slurmd answers, so that it is there again at once.
    slurm.call("scontrol", "update", f"nodename={slurm.names[1]}", "state=down", "reason=a test of it")
    until(lambda: len(job.of("rl")) == 2, 60, "another start", lambda: job.log)
    state = job.ends()
    assert state["JobState"] == "COMPLETED", job.log
    assert state["Restarts"] == "1"
    first, second = job.of("rl")
    assert first[-1] == "--overwrite"
    assert second[-1] == "--resume"
