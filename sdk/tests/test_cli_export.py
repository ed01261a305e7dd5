"""`quartet export`: where it looks for states, and what it says where it cannot."""

from __future__ import annotations

import json
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


def test_any_other_folder_is_one_of_states(tmp_path: Path, asked: list[list[str]]) -> None:
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
