"""The script of a job of SLURM, run under bash where SLURM and `quartet rl` are small programs
(fake_slurm.py, queued_run.py): what becomes of signals, of a second start, of other machines that fail."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import program, programs_first
from quartet.cli.slurm.script import Queued, script_of
from quartet.run.slurm import SlurmConfig

SECONDS = 60.0


class Job:
    """The script of a job, run as SLURM would."""

    def __init__(
        self, folder: Path, *, machines: int = 1, begin: Any = "", setup: tuple[str, ...] = ()
    ) -> None:
        self.folder = folder
        config = SlurmConfig(setup=setup)
        queued = Queued("r", folder, folder.parent, machines, None, begin)
        queued.beside.mkdir(parents=True)
        (queued.beside / "run.toml").touch()
        self.file = queued.beside / "job.sh"
        ours = f"quartet=({shlex.join([sys.executable, '-m', 'quartet.cli'])})"
        fake = shlex.join([sys.executable, str(Path(__file__).with_name("queued_run.py"))])
        script = script_of(queued, config)
        assert script.count(ours) == 1
        self.file.write_text(script.replace(ours, f"quartet=({fake})"))
        self.machines = machines
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, *, restarts: int = 0, hangups: str = "default", **variables: str
    ) -> subprocess.Popen[str]:
        """By a slurmstepd, which leaves SIGHUP as it is by default, or ignored."""
        of_slurm = {
            "SLURM_JOB_ID": "50", "SLURM_JOB_NODELIST": f"n[1-{self.machines}]", "SLURMD_NODENAME": "n1",
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
        }  # fmt: skip
        command = ["env", f"--{hangups}-signal=HUP", "bash", str(self.file)]
        process = subprocess.Popen(
            command, env={**os.environ, **of_slurm, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def ends(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Exit code, and what it said."""
        said, _ = process.communicate(timeout=SECONDS)
        return process.returncode, said

    @property
    def noted(self) -> list[dict[str, Any]]:
        """What the fake run noted."""
        file = Path(f"{self.folder}.noted")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def of(self, key: str) -> list[Any]:
        """What was noted under a key."""
        return [line[key] for line in self.noted if key in line]

    def steps(self) -> int:
        """So many were done."""
        metrics = self.folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Makes one; what is left of it at the end is killed."""
    programs = programs_first(tmp_path, monkeypatch)
    made: list[Job] = []
    program(programs, "scontrol", _SCONTROL)
    program(programs, "srun", _SRUN)

    def make(**how: Any) -> Job:
        made.append(Job(tmp_path / "o u t" / "first", **how))
        return made[-1]

    yield make
    for job in made:
        for process in job.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


_SCONTROL = """\
[ "$1" = show ] || exit 0
last=${3#*-}
for number in $(seq "${last%]}"); do echo "n$number"; done
"""
#: As srun, with --kill-on-bad-exit: a process for each of the nodes.
_SRUN = """\
while [ "${1#--}" != "$1" ]; do
    case $1 in --nodelist=*) nodes=${1#*=} ;; esac
    shift
done
for node in ${nodes//,/ }; do SLURMD_NODENAME=$node "$@" & done
code=0
for node in ${nodes//,/ }; do
    wait -n || { code=$?; kill $(jobs -p) 2>/dev/null; break; }
done
exit $code
"""


def test_a_run_on_three_machines_is_completed(jobs: Callable[..., Job], tmp_path: Path) -> None:
    job = jobs(machines=3, setup=("export SHOWN=yes", "false || true"))
    code, said = job.ends(job.start(QUEUED_RUN_STEPS="3"))
    assert code == 0, said
    assert job.of("rl") == [
        [
            "@", f"{job.folder}.slurm/run.toml", "--output-dir", str(job.folder), "--run-id", "r", "--plain",
            "--stop-seconds", "260", "--hosts", "n1,n2,n3", "--first-port", "10200",
        ]
    ]  # fmt: skip
    assert sorted(job.of("node")) == ["n2", "n3"]
    assert job.of("shown") == ["yes"]
    srun = next(line for line in (tmp_path / "called").read_text().splitlines() if line.startswith("srun"))
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=n2,n3" in srun


def test_near_the_time_limit_the_run_stops_is_queued_again_and_goes_on(
    jobs: Callable[..., Job], tmp_path: Path
) -> None:
    job = jobs(machines=2, begin="--overwrite")
    job.folder.mkdir()
    (job.folder / "run.json").write_text("{}")
    os.utime(job.folder / "run.json", (0, 0))  # of the run before
    began = job.start()
    until(lambda: job.steps() > 1)
    began.send_signal(signal.SIGUSR1)
    code, said = job.ends(began)
    assert code == 130, said
    assert job.of("ended") == ["stopped"]
    assert "scontrol requeue 50" in (tmp_path / "called").read_text().splitlines()
    assert "the job is queued again, and goes on" in said
    steps = job.steps()
    code, said = job.ends(job.start(restarts=1, QUEUED_RUN_STEPS=str(steps + 2)))
    assert code == 0, said
    assert "started 1 times before" in said
    first, second = job.of("rl")
    assert first[-1] == "--overwrite"
    assert second[-1] == "--resume"
    assert job.steps() == steps + 2


def test_a_run_that_nobody_accepted_before_the_job_was_queued_is_not_gone_on_with(
    jobs: Callable[..., Job],
) -> None:
    """It may have been another one, which --resume would refuse."""
    job = jobs()
    job.folder.mkdir()
    (job.folder / "run.json").write_text('{"accepted": false}')
    os.utime(job.folder / "run.json", (0, 0))
    for restarts in range(2):
        code, said = job.ends(job.start(restarts=restarts, QUEUED_RUN_STEPS=str(1 + restarts)))
        assert code == 0, said
    assert ["--resume" in words for words in job.of("rl")] == [False, True]


def test_a_run_stops_in_order_also_where_hangups_are_ignored(
    jobs: Callable[..., Job], tmp_path: Path
) -> None:
    job = jobs()
    began = job.start(hangups="ignore")
    until(lambda: job.steps() > 1)
    began.send_signal(signal.SIGUSR1)
    code, said = job.ends(began)
    assert code == 130, said
    assert (job.of("signal"), job.of("ended")) == (["SIGTERM"], ["stopped"])
    assert "scontrol requeue 50" in (tmp_path / "called").read_text().splitlines()


def test_a_job_that_did_no_step_is_not_queued_again(jobs: Callable[..., Job], tmp_path: Path) -> None:
    job = jobs()
    job.folder.mkdir()
    (job.folder / "run.json").write_text("{}")
    (job.folder / "metrics.jsonl").write_text("1\n2\n")
    began = job.start(QUEUED_RUN_DEAF="30")
    until(lambda: len(job.of("rl")) == 1)
    began.send_signal(signal.SIGUSR1)
    code, said = job.ends(began)
    assert code == 129, said
    assert "no step was done within the time limit, and it would be so again: raise slurm.time" in said
    assert f"quartet slurm @ {str(job.folder).replace(' ', chr(92) + ' ')}/run.toml" in said
    assert "requeue" not in (tmp_path / "called").read_text()


@pytest.mark.parametrize("to_all", [False, True], ids=["the script", "all processes"])
def test_a_job_that_is_ended_stops_its_run_in_order(
    to_all: bool, jobs: Callable[..., Job], tmp_path: Path
) -> None:
    job = jobs()
    began = job.start(QUEUED_RUN_STOP="3")
    until(lambda: job.steps() > 1)
    if to_all:
        os.killpg(began.pid, signal.SIGTERM)
    else:
        began.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        began.send_signal(signal.SIGTERM)
    code, said = job.ends(began)
    assert code == 130, said
    assert job.of("ended") == ["stopped"], "and was not killed by a second signal"
    assert not job.of("killed")
    assert "as a job it goes on with: quartet slurm @ " in said
    assert "requeue" not in (tmp_path / "called").read_text()


def test_an_end_that_is_asked_for_after_the_time_limit_came_near_is_one(
    jobs: Callable[..., Job], tmp_path: Path
) -> None:
    job = jobs()
    began = job.start(QUEUED_RUN_HOLD=str(tmp_path / "asked twice"))
    until(lambda: job.steps() > 1)
    began.send_signal(signal.SIGUSR1)
    until(lambda: bool(job.of("signal")))
    began.send_signal(signal.SIGTERM)
    (tmp_path / "asked twice").touch()
    code, said = job.ends(began)
    assert code == 130, said
    assert job.of("ended") == ["stopped"]
    assert "requeue" not in (tmp_path / "called").read_text()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_during_setup_keeps_the_run_from_starting(
    number: signal.Signals, jobs: Callable[..., Job]
) -> None:
    job = jobs(setup=("touch up", "until [ -e go ]; do sleep 0.05; done"))
    began = job.start()
    until((job.folder.parent / "up").exists)
    began.send_signal(number)
    (job.folder.parent / "go").touch()
    code, said = job.ends(began)
    assert code == 130, said
    assert job.noted == []


def test_a_machine_whose_part_fails_stops_the_run(jobs: Callable[..., Job], tmp_path: Path) -> None:
    job = jobs(machines=3)
    code, said = job.ends(job.start(QUEUED_RUN_FAILS="n3"))
    assert code == 1, said
    assert "the part of another machine ended before the run, which was stopped" in said
    assert job.of("ended") == ["stopped"]
    assert "requeue" not in (tmp_path / "called").read_text()


def test_the_exit_code_of_a_run_that_fails_is_the_jobs(jobs: Callable[..., Job]) -> None:
    job = jobs()
    assert job.ends(job.start(QUEUED_RUN_CODE="2"))[0] == 2
    job.folder.mkdir()
    (job.folder / "run.json").write_text("{}")
    assert job.ends(job.start(QUEUED_RUN_CODE="1"))[0] == 1


def test_a_line_of_setup_that_fails_ends_the_job_with_its_words(jobs: Callable[..., Job]) -> None:
    job = jobs(setup=("echo up", "false", "echo never"))
    code, said = job.ends(job.start())
    assert code == 1
    assert "slurm.setup: false: exit code 1; mend that line, and queue the run again" in said
    assert "never" not in said
    assert job.noted == []


def test_fewer_machines_than_the_run_wants_are_refused(jobs: Callable[..., Job]) -> None:
    job = jobs(machines=3)
    job.machines = 2
    code, said = job.ends(job.start())
    assert code == 1
    assert "the run has 3 machines, and the job has n[1-2]" in said
