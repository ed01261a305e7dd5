"""`quartet export`: where it looks for states, which it chooses, and what it says where it cannot."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from quartet.cli.__main__ import main
from quartet.cli.job import RECORD


class Became(Exception):
    """The process became another."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the trainer's package was asked."""
    calls: list[list[str]] = []

    def become(_: str, command: list[str]) -> None:
        calls.append(command[3:])
        raise Became

    monkeypatch.setattr(os, "execv", become)
    return calls


def test_the_states_of_an_output_folder_are_where_its_trainer_kept_them(
    tmp_path: Path, asked: list[list[str]]
) -> None:
    (tmp_path / RECORD).write_text(json.dumps({"run_id": "first", "config_toml": ""}))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "trainer.toml").write_text('state_dir = "/disk/states"\n')
    with pytest.raises(Became):
        main(["export", str(tmp_path), "model", "--state", "state-1"])
    assert asked == [["--state", "state-1", "--", "/disk/states/first", "model"]]
    own = tmp_path / "data" / "trainer"
    own.mkdir(parents=True)
    with pytest.raises(Became):
        main(["export", str(tmp_path), "model"])
    assert asked[1] == ["--", str(own / "first"), "model"], "of a folder that was moved or copied, its own"


def measured(folder: Path, *rows: dict[str, float]) -> Path:
    """An output folder whose run was evaluated so."""
    (folder / RECORD).write_text(json.dumps({"run_id": "first", "config_toml": ""}))
    (folder / "data" / "trainer").mkdir(parents=True)
    lines = [json.dumps(row) for row in ({"step": 1, "train/reward": 9.0}, *rows)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 7, "eval/rew')  # one is on its way
    return folder


def of_version(version: int, reward: float, **more: float) -> dict[str, float]:
    return {"step": 2 * version, "policy_version": version, "eval/reward": reward, **more}


def test_the_best_is_asked_for_by_its_version_and_those_behind_it(
    tmp_path: Path, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """best.py 1 to 3."""
    rows = [of_version(0, 0.1), of_version(3, 0.9), of_version(6, 0.5), of_version(9, 0.5)]
    folder = measured(tmp_path, *rows, of_version(3, 0.7), of_version(12, math.nan))
    with pytest.raises(Became):
        main(["export", str(folder), "model", "--best"])
    assert asked == [["--versions", "3,9,6,0", "--", str(folder / "data" / "trainer" / "first"), "model"]]
    assert capsys.readouterr().out == (
        "eval/reward, the best first: 0.7 (version 3), 0.5 (version 9), 0.5 (version 6), 0.1 (version 0)\n"
    )


def test_an_evaluation_whose_rollouts_failed_comes_behind_those_that_are_whole(
    tmp_path: Path, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """best.py 4."""
    of_a = {"eval/a/reward": 0.2, "eval/a/coverage": 1.0}
    rows = [
        of_version(0, 0.1, **{"eval/coverage": 1.0, **of_a}),
        of_version(3, 0.9, **{"eval/coverage": 0.4, "eval/a/reward": 0.9, "eval/a/coverage": 1.0}),
        of_version(6, 0.5, **{"eval/coverage": 0.95, "eval/a/reward": 0.99, "eval/a/coverage": 0.2}),
    ]
    folder = measured(tmp_path, *rows)
    with pytest.raises(Became):
        main(["export", str(folder), "model", "--best"])
    assert asked[0][:2] == ["--versions", "6,0,3"]
    assert capsys.readouterr().out == (
        "eval/reward, the best first: 0.5 (version 6, from 95% of its rollouts), 0.1 (version 0), "
        "0.9 (version 3, from 40% of its rollouts)\n"
    )
    with pytest.raises(Became):
        main(["export", str(folder), "model", "--by", "eval/a/reward"])
    assert asked[1][:2] == ["--versions", "3,0,6"], "of an environment, by its own coverage"


@pytest.mark.parametrize(("by", "versions"), [("eval/a/reward", "1,2"), ("eval/a/loss", "2,1")])
def test_the_best_is_found_by_another_number_of_the_evaluations(
    by: str, versions: str, tmp_path: Path, asked: list[list[str]]
) -> None:
    of_a = [{"eval/a/reward": 0.9, "eval/a/loss": 5.0}, {"eval/a/reward": 0.2, "eval/a/loss": 4.0}]
    folder = measured(tmp_path, *(of_version(number, number, **one) for number, one in enumerate(of_a, 1)))
    with pytest.raises(Became):
        main(["export", str(folder), "model", "--by", by])
    assert asked[0][:2] == ["--versions", versions]


def test_of_a_fine_tuning_the_smallest_loss_on_its_validation_is_the_best(
    tmp_path: Path, asked: list[list[str]]
) -> None:
    folder = measured(
        tmp_path, {"step": 0, "val/loss": 3.0}, {"step": 4, "val/loss": 1.0}, {"step": 8, "val/loss": 2.0}
    )
    with pytest.raises(Became):
        main(["export", str(folder), "model", "--best"])
    assert asked[0][:2] == ["--versions", "4,8,0"]


def test_what_cannot_be_chosen_by_is_refused(
    tmp_path: Path, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert main(["export", str(tmp_path), "model", *arguments]) == 2
        return capsys.readouterr().err

    measured(tmp_path)
    assert "has no evaluation (in metrics.jsonl) to choose by" in refused("--best")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "eval/coverage": 0.0}) + "\n")
    assert "no eval/reward and no val/loss; name with --by one of eval/coverage" in refused("--best")
    assert "no evaluation has it; did you mean 'eval/coverage'?" in refused("--by", "eval/coverag")
    assert "no evaluation has it; they have eval/coverage" in refused("--by", "train/reward")
    (tmp_path / "metrics.jsonl").write_text("[]\n{}\n")
    assert "metrics.jsonl:1 is no line of metrics" in refused("--best")
    assert asked == []


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ([RECORD, "COMPLETE.json"], "is one saved state;"),
        (["state-1@4/COMPLETE.json", "state-1@4/run.json"], "is a folder of saved states;"),
        (["metrics.jsonl"], "is no output folder: it has no run.json;"),
    ],
)
def test_a_folder_that_has_no_evaluations_beside_it_is_refused_as_what_it_is(
    files: list[str], what: str, tmp_path: Path, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    for more in (["--best"], ["--by", "eval/reward"]):
        assert main(["export", str(tmp_path), "model", *more]) == 2
        said = capsys.readouterr().err
        assert f"{str(tmp_path)!r} {what} --best and --by go by the evaluations in an output folder" in said
    assert asked == []


def test_what_is_said_of_the_other_kind_of_run_is_refused(
    tmp_path: Path, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """export.py 4."""
    for more in (["--best"], ["--by", "eval/reward"]):
        assert main(["export", "r", str(tmp_path / "model"), "--orchestrator", "127.0.0.1:1", *more]) == 2
        assert "--best and --by go by the metrics in an output folder" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "model", "--adapter"]) == 2
    assert (
        "--adapter is for --orchestrator; what is written here has it in adapter/" in capsys.readouterr().err
    )
    assert asked == []


def test_any_other_folder_is_one_of_states(tmp_path: Path, asked: list[list[str]]) -> None:
    with pytest.raises(Became):
        main(["export", str(tmp_path), "model"])
    assert asked == [["--", str(tmp_path), "model"]]


def test_one_state_is_none_of_an_output_folder(tmp_path: Path, asked: list[list[str]]) -> None:
    """export.py 1: it has a run.json, too."""
    for name in (RECORD, "COMPLETE.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(Became):
        main(["export", str(tmp_path), "model"])
    assert asked == [["--", str(tmp_path), "model"]]


def test_an_output_folder_that_lost_its_configuration_is_refused(
    tmp_path: Path, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RECORD).write_text(json.dumps({"run_id": "first"}))
    assert main(["export", str(tmp_path), "model"]) == 2
    assert "name their folder" in capsys.readouterr().err
    assert asked == []


def test_a_run_that_somebody_else_trained_has_no_model_here(
    tmp_path: Path, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """export.py 2."""
    (tmp_path / RECORD).write_text(
        json.dumps({"run_id": "first", "config_toml": "external_trainer = true\n"})
    )
    assert main(["export", str(tmp_path), "model"]) == 2
    assert "the weights are with the program that trains" in capsys.readouterr().err
    assert asked == []


def test_a_folder_that_is_not_there_is_refused_before_torch_is_loaded(
    tmp_path: Path, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "first").mkdir()
    assert main(["export", str(tmp_path / "frist"), "model"]) == 2
    assert f"did you mean '{tmp_path / 'first'}'?" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nothing-like-it"), "model"]) == 2
    assert "is no folder; name the output folder of a run" in capsys.readouterr().err
    assert asked == []
