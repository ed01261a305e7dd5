"""`quartet eval --resume`: what an evaluation was asked for is kept, and need not be said again."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.__main__ import build_parser, main
from quartet.cli.eval import command
from quartet.cli.eval.command import Plan, plan_of, read
from quartet.cli.eval.record import Record
from quartet.cli.eval.source import choose
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.local.supervisor import ServiceFailed
from quartet.v1.envhost_service_pb2 import EnvironmentInfo
from quartet.v1.rollout_pb2 import FAILURE_KIND_TIMEOUT, Rollout, RolloutFailure, Task


def asked_of(tmp_path: Path, *arguments: str) -> Any:
    options, rest = build_parser().parse_known_args(["eval", *arguments, "-o", str(tmp_path / "out")])
    config = read(options, rest)
    return config, plan_of(config, choose(config, ()), options)


def test_a_resumed_evaluation_need_not_be_told_what_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither one of flags nor one of a file, of which the last is taken where none is named."""
    (tmp_path / "m").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "m" / name).touch()
    (file := tmp_path / "eval.toml").write_text(
        f"""model = "{tmp_path}/m"\nnum_examples = 7\nenvhost = {{ workers = 3 }}
[[eval]]\nid = "e"\nargs = {{ key = "sk-1", n = 1.0 }}
[[ablation]]\nid = "f"\n[ablation.sweep]\ntemperature = [0.0, 1.0]\n"""
    )

    def fails(*_: object) -> None:
        for record in command_plan:
            with record.held(EnvironmentInfo(), [Task(index=0)]):
                record.note(Task(index=0), Rollout(failure=failed))

    failed = RolloutFailure(kind=FAILURE_KIND_TIMEOUT, message="late")

    command_plan: list[Record] = []
    monkeypatch.setattr(command, "deploy", lambda *given: [])
    monkeypatch.setattr(command, "with_host", fails)
    real = command.plan_of

    def planned(*given: Any) -> Plan:
        plan = real(*given)
        command_plan[:] = plan.records
        return plan

    monkeypatch.setattr(command, "plan_of", planned)
    given = '{"k": [1, null, "\\u2603"], "a-b": null, "a_b": 1}'
    flags = ["e", "-m", str(tmp_path / "m"), "-n", "2", "-r", "4", "-T", "0.5", "-a", given]
    for one in ([*flags, "--run-id", "first"], ["@", str(file), "--run-id", "second", "-c", "9"]):
        assert main(["eval", *one, "-o", str(tmp_path / "out"), "--plain"]) == 1
        again = f"quartet eval --resume {one[one.index('--run-id') + 1]} -o {tmp_path / 'out'}"
        assert again in capsys.readouterr().err

    config, plan = asked_of(tmp_path, "--resume", "first")
    (resumed,) = plan.records
    assert (plan.run_id, resumed.trial.hosted.args) == ("first", json.loads(given))
    assert (resumed.trial.num_examples, resumed.trial.rollouts_per_example) == (2, 4)
    assert resumed.trial.sampling.temperature == 0.5
    config, plan = asked_of(tmp_path, "--resume")
    names = ["e", "f temperature=0.0", "f temperature=1.0"]
    assert (plan.run_id, [one.trial.name for one in plan.records]) == ("second", names)
    assert (config.max_concurrent, config.envhost, plan.records[0].trial.num_examples) == (
        9,
        {"workers": 3},
        7,
    )
    (kept,) = (tmp_path / "out" / "evals" / "services" / "second").glob("*/asked.json")
    assert kept.stat().st_mode & 0o077 == 0, "an environment's arguments may hold a judge's key"

    more, _ = asked_of(tmp_path, "--resume", "first", "-n", "9")
    assert more.num_examples == 9, "what is said now wins"
    more, _ = asked_of(tmp_path, "--resume", "--run-id", "first")
    assert more.num_examples == 2, "--run-id names it as well"
    options, rest = build_parser().parse_known_args(
        ["eval", "--resume", "first", "-b", "http://h/v1", "-o", str(tmp_path / "out")]
    )
    assert read(options, rest).base_url == "http://h/v1", "what is said now need not be whole by itself"
    for name in ("/tmp/first", "../services/first", "*"):
        with pytest.raises(ConfigError, match="is refused: use 1 to 64 of A-Z"):
            asked_of(tmp_path, "--resume", name)
    with pytest.raises(ConfigError, match="has no evaluation third that goes on without being told its"):
        asked_of(tmp_path, "--resume", "third")
    with pytest.raises(ConfigError, match="rollouts_per_example = 5 is refused"):
        asked_of(tmp_path, "--resume", "first", "-r", "5")
    kept.write_text(kept.read_text().replace("num_examples", "examples_of_9"))
    with pytest.raises(ConfigError, match=rf"unknown key 'examples_of_9' \(in {kept}\)"):
        asked_of(tmp_path, "--resume", "second")
    kept.write_text("{}")
    with pytest.raises(ConfigError, match="no environment is named"):
        asked_of(tmp_path, "--resume", "second", "-m", str(tmp_path / "m"))
    kept.write_text("torn")
    with pytest.raises(ConfigError, match=r"asked.json cannot be read \(Expecting.*name the environment"):
        asked_of(tmp_path, "--resume", "second")


def test_where_two_evaluations_have_one_name_a_resume_asks_which(tmp_path: Path) -> None:
    for name in ("a--m", "b--m"):
        (folder := tmp_path / "out" / "evals" / "services" / "one" / name).mkdir(parents=True)
        (folder / "asked.json").touch()
    with pytest.raises(ConfigError, match="one is the name of a--m, b--m; name the environment and model"):
        asked_of(tmp_path, "--resume", "one")


def test_one_that_was_killed_before_its_environment_had_loaded_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "m" / name).touch()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "deploy", lambda *given: [])
    monkeypatch.setattr(command, "with_host", killed)
    out = tmp_path / "out"
    assert main(["eval", "e", "-m", str(tmp_path / "m"), "-o", str(out), "--run-id", "one", "--plain"]) == 130
    assert not (out / "evals" / "e--m").exists()
    _, plan = asked_of(tmp_path, "--resume")
    assert (plan.run_id, [one.trial.name for one in plan.records]) == ("one", ["e"])


def test_one_that_was_refused_before_it_began_is_gone_on_with_by_its_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """kept.py 3: the last one is another, and is said."""
    (tmp_path / "m").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "m" / name).touch()
    ends: BaseException = KeyboardInterrupt()

    def ended(*_: object) -> None:
        raise ends

    monkeypatch.setattr(command, "deploy", lambda *given: [])
    monkeypatch.setattr(command, "with_host", ended)
    model, out = str(tmp_path / "m"), str(tmp_path / "out")
    assert main(["eval", "e", "-m", model, "-o", out, "--run-id", "one", "--plain"]) == 130
    ends = ConfigError("the environment is not there")
    assert main(["eval", "f", "-m", model, "-o", out, "--run-id", "two", "--plain"]) == 2
    capsys.readouterr()
    assert asked_of(tmp_path, "--resume")[1].run_id == "one"
    of_it = (tmp_path / "out/evals/services/one").iterdir()
    assert capsys.readouterr().err == f"--resume: the last one is one of {next(of_it).name}\n"
    assert [one.trial.name for one in asked_of(tmp_path, "--resume", "two")[1].records] == ["f"]
    assert not capsys.readouterr().err, "whoever names it knows"
    ends = KeyboardInterrupt()
    assert main(["eval", "--resume", "two", "-o", out, "--plain"]) == 130
    assert asked_of(tmp_path, "--resume")[1].run_id == "two", "what was wrong is mended"
    ends = ConfigError("the environment is not there")
    for name in ("one", "two"):
        assert main(["eval", "--resume", name, "-o", out, "--plain"]) == 2
    with pytest.raises(ConfigError, match="evals has no evaluation that goes on without being told its"):
        asked_of(tmp_path, "--resume")

    unavailable = QuartetError("ENVIRONMENT_UNAVAILABLE", "its worker does not start")
    for breaks in (ConfigError("no such key"), ServiceFailed("envhost does not start"), unavailable):
        ends = breaks
        assert main(["eval", "--resume", "one", "-o", out, "--plain", "-n", "9"]) != 0
        assert asked_of(tmp_path, "--resume", "one")[0].num_examples != 9, "promise 4"
    ends = KeyboardInterrupt()
    assert main(["eval", "--resume", "one", "-o", out, "--plain", "-n", "9"]) == 130
    assert asked_of(tmp_path, "--resume", "one")[0].num_examples == 9

    touch = Path.touch

    def full(file: Path, *mode: int) -> None:
        if file.name == "refused":
            raise OSError(errno.ENOSPC, "No space left on device")
        touch(file, *mode)

    capsys.readouterr()
    monkeypatch.setattr(Path, "touch", full)
    ends = ConfigError("the environment is not there")
    assert main(["eval", "f", "-m", model, "-o", out, "--run-id", "three", "--plain"]) == 2
    assert "the environment is not there" in capsys.readouterr().err, "and not that the disk is full"
