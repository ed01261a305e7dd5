"""`quartet model tiny` where its services do not do their part, and what it leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from quartet.cli.__main__ import main
from quartet.cli.tiny import command, teach
from quartet.cli.tiny.courses import Packaged
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.local.supervisor import ServiceFailed
from quartet.v1.inference_service_pb2 import GetModelResponse


async def test_a_replica_that_serves_no_new_version_ends_it_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def older(*_: object, **__: object) -> GetModelResponse:
        return GetModelResponse(run_id="r", policy_version=1)

    monkeypatch.setattr(teach, "unary", older)
    monkeypatch.setattr(teach, "SERVE_SECONDS", 0.1)
    lesson = teach.Lesson(Mock(), Mock(), "r", Mock())
    with pytest.raises(QuartetError, match="inference does not serve version 2 after"):
        await lesson._served(2)


def names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


def test_what_a_killed_one_left_is_deleted_and_two_do_not_make_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["model", "tiny", str(tmp_path / "tiny")]

    async def make(work: Path, *_: object) -> None:
        assert names(work) == [".lock"]
        assert main(arguments) == 2
        raise ServiceFailed("trainer did not start")

    monkeypatch.setattr(command, "_make", make)
    (tmp_path / ".tiny.partial" / "base").mkdir(parents=True)
    assert main(arguments) == 1
    assert "is being made by another 'quartet model tiny'" in capsys.readouterr().err
    assert names(tmp_path) == []


def test_a_model_is_made_where_a_link_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a larger disk, say: a link cannot be replaced as a folder is, once the model is made."""
    out, there = tmp_path / "tiny", tmp_path / "large" / "tiny"
    there.mkdir(parents=True)
    out.symlink_to(there)

    async def make(work: Path, *_: object) -> command.Made:
        (work / "base").mkdir()
        (work / "made").mkdir()
        (work / "made" / "config.json").touch()
        return command.Made(work / "made", 1, 1.0, 1, 0.4)

    monkeypatch.setattr(command, "_make", make)
    for again in ([], ["--force"]):
        assert main(["model", "tiny", str(out), *again]) == 0
        assert out.is_symlink() and sorted(names(there)) == ["config.json", command.RECORD]


def test_a_task_whose_package_is_not_there_is_told_with_where_it_would_be(tmp_path: Path) -> None:
    task = "my-no-such-task"
    said = f"--task {task} is a package that {sys.executable} has not; 'quartet env install' with its folder "
    with pytest.raises(ConfigError) as refused:
        Packaged(task, Path(sys.executable))
    assert str(refused.value).startswith(said)
    assert " in .quartet/envs/my_no_such_task/bin/python: name that with --python" in str(refused.value)
    with pytest.raises(
        ConfigError, match=r"has no demonstrations to learn from: ModuleNotFoundError: .*json\.d"
    ):
        Packaged("json", Path(sys.executable))
