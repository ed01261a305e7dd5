"""A run that is handed to SLURM: what is refused, and what is written down and queued. How the job then
behaves: test_cli_slurm_job.py, and with a real SLURM tests/slurm."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_slurm import program, programs_first
from planned_runs import CONFIG
from quartet.cli.__main__ import main
from quartet.cli.run_file import load_run
from quartet.cli.slurm.script import gpus_of
from quartet.config import ConfigError, validate
from quartet.run.slurm import SlurmConfig
from quartet.run.written_out import is_same_run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def slurm(model: Path, *arguments: str | Path) -> int:
    """The command, where an environment is (`.venv-envs`, or a name that needs none)."""
    words = ["slurm", "@", str(CONFIG), "--model", str(model), "--envhost.python", sys.executable]
    return main([*words, *map(str, arguments)])


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Before all others on PATH."""
    return programs_first(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def any_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interpreter of environments is looked for."""
    monkeypatch.setattr("quartet.cli.rl.with_interpreters", lambda envhost, _: envhost)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("time", "soon", "slurm.time = 'soon' is refused: give minutes, MM:SS, HH:MM:SS, D-HH or D-HH:MM:SS"),
        ("time", 0, "slurm.time = 0 is refused: give minutes"),
        ("time", 5, "slurm.time = 5 is 300 seconds, and slurm.stop_seconds = 300 of them are for the end"),
        ("stop_seconds", 30, "slurm.stop_seconds = 30"),
        ("partition", "a b", "slurm.partition = 'a b'"),
        ("options", ["-C h100"], "'-C h100' is no option of sbatch in its long form; write \"--name=value\""),
        ("options", ["--comment=a\nb"], "is no option of sbatch in its long form"),
        ("options", ["--nodes=3"], "--nodes has its own place: trainer.nodes and inference.nodes; remove it"),
        ("setup", "module load cuda", 'give a list of lines, such as ["module load cuda"]'),
        ("setup", ["a\nb"], "is no whole line; write each command as one of the list"),
        ("setup", ["a \\"], "is no whole line"),
        ("gpus_per_node", -1, "slurm.gpus_per_node = -1"),
        ("partitoin", "gpu", "unknown key 'slurm.partitoin'; did you mean 'slurm.partition'?"),
    ],
)
def test_a_table_that_sbatch_would_trip_over_is_refused(
    key: str, value: Any, sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "slurm.toml"
    file.write_text(f"[slurm]\n{key} = {json.dumps(value)}\n")
    with pytest.raises(ConfigError) as refused:
        load_run(["@", str(CONFIG), "@", str(file)], starts_services=False)
    assert sentence in str(refused.value).replace(f" (in {file})", "")


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        (90, 5400), ("90", 5400), ("90:30", 5430), ("1:00:00", 3600), ("2-0", 172_800),
        ("1-02:30", 95_400), ("0-00:10:01", 601),
    ],
)  # fmt: skip
def test_a_time_is_read_as_slurm_reads_it(time: str | int, seconds: int) -> None:
    assert validate(SlurmConfig, {"time": time}).limit_seconds == seconds


def test_a_queued_run_is_the_run_that_it_would_be_without() -> None:
    run = load_run(["@", str(CONFIG)], starts_services=False).config
    queued = load_run(["@", str(CONFIG), "--slurm.time", "60"], starts_services=False).config
    assert queued.slurm.limit_seconds == 3600
    assert is_same_run(run, queued)


@pytest.mark.parametrize(
    ("trainer", "inference", "gpus"),
    [
        ({}, {}, None),
        ({"gpus": 2}, {"gpus": 6}, 8),
        ({"gpus": 2}, {"gpus": 6, "nodes": 1}, 6),
        ({"gpus": 8, "nodes": 2}, {"gpus": 4, "nodes": 1}, 8),
        ({"gpus": [6, 7]}, {"gpus": 4}, 8),
        ({"gpus": 0}, {"gpus": 0}, 0),
    ],
)
def test_a_machine_has_the_gpus_that_its_services_say(
    trainer: dict[str, Any], inference: dict[str, Any], gpus: int | None
) -> None:
    assert gpus_of({"trainer": trainer, "inference": inference}) == gpus


def test_a_dry_run_prints_a_script_and_leaves_nothing(
    model: Path, tmp_path: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(programs, "sbatch", "exit 1")
    output = tmp_path / "outputs" / "it's" / "50% a"
    assert slurm(model, "--output-dir", output, "--dry-run") == 2
    assert "SLURM takes no name with" in capsys.readouterr().err
    output = tmp_path / "outputs" / "50% a"
    words = ["--trainer.nodes", "2", "--inference.nodes", "1", "--trainer.gpus", "2", "--inference.gpus", "4"]
    asks = ["--slurm.partition", "gpu", "--slurm.time", "1-00", "--slurm.options", '["--comment=a b"]']
    assert slurm(model, "--output-dir", output, *words, *asks, "--dry-run") == 0
    script = capsys.readouterr().out
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert [shlex.split(line)[0] for line in asked] == [
        "--job-name=50--a", "--nodes=3", "--ntasks-per-node=1", "--partition=gpu", "--time=1-00",
        "--gpus-per-node=4", "--exclusive", "--mem=0", "--signal=B:USR1@300", "--requeue",
        f"--output={tmp_path}/outputs/50%% a.slurm/%j.log", "--open-mode=append", "--comment=a b",
    ]  # fmt: skip
    assert not (tmp_path / "outputs").exists()
    assert not (tmp_path / "called").exists()


def test_what_quartet_rl_refuses_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert slurm(model, "--output-dir", tmp_path / "out", "--trainer.nodez", "2", "--batch-size", "100") == 2
    shown = capsys.readouterr().err
    assert "rollouts_per_example = 8 does not divide it" in shown
    assert "[trainer] unknown key 'nodez'" in shown
    assert (
        slurm(model, "--output-dir", tmp_path / "out", "--inference.nodes", "1", "--trainer.nodez", "2") == 2
    )
    assert "[trainer] unknown key 'nodez'" in capsys.readouterr().err
    assert slurm(model, "--output-dir", tmp_path / "out", "--trainer.nodes", "0") == 2
    assert "trainer.nodes = 0 is refused: give how many machines it has" in capsys.readouterr().err
    assert slurm(model, "--output-dir", tmp_path / "out", "--resume") == 2
    assert "holds no run" in capsys.readouterr().err
    assert slurm(model, "--output-dir", tmp_path / "out", "--slurm.setup", '["if true"]') == 2
    assert "slurm.setup is refused: bash says" in capsys.readouterr().err
    assert not (tmp_path / "out.slurm").exists()


def test_without_slurm_it_is_said_where_to_go(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quartet.cli.slurm.command.shutil", SimpleNamespace(which=lambda name: None))
    assert slurm(model, "--output-dir", tmp_path / "out") == 2
    assert "sbatch is not installed here; run this where SLURM is" in capsys.readouterr().err
    assert not (tmp_path / "out.slurm").exists()


def test_a_run_is_written_down_and_queued_once(
    model: Path, tmp_path: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    program(programs, "sbatch", 'echo "sbatch: error: invalid partition" >&2; exit 1')
    assert slurm(model, "--output-dir", output) == 2
    assert "sbatch took no job: sbatch: error: invalid partition; what it asks for is in [slurm]" in (
        said := capsys.readouterr().err
    )
    assert "invalid partition" in said
    program(programs, "sbatch", "echo '77;cluster'")
    program(programs, "squeue", "echo RUNNING")
    assert slurm(model, "--output-dir", output, "--max-steps", "7") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"job 77: the run 'out' in {output}, on one machine\n")
    assert f"tail -F {output}.slurm/77.log" in said
    assert (tmp_path / "called").read_text().splitlines()[-1] == f"sbatch --parsable {output}.slurm/job.sh"
    frozen = output.with_name("out.slurm") / "run.toml"
    assert load_run(["@", str(frozen)], starts_services=False).config.max_steps == 7
    assert frozen.stat().st_mode & 0o777 == 0o600, "a judge's key may be in it"
    assert slurm(model, "--output-dir", output, "--max-steps", "8") == 2
    assert f"output folder {output} has the job 77 (RUNNING)" in capsys.readouterr().err
    program(programs, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm(model, "--output-dir", output, "--max-steps", "8") == 0
    assert not output.exists(), "it is quartet rl that makes it"


@pytest.mark.parametrize(
    ("given", "seconds"), [(datetime.time(8, 30), 30_600), ("1:30", 90), (90, 5400), ("2-00", 172_800)]
)
def test_a_time_is_read_as_slurm_writes_it(given: object, seconds: int) -> None:
    """Also where TOML takes it for a time of day."""
    read = SlurmConfig.model_validate({"time": given, "stop_seconds": 60})
    assert read.limit_seconds == seconds
