"""What samples the run of another trainer's file (cli/their_engine.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from prime_rl_files import TASKSETS
from quartet.cli import their_engine
from quartet.cli.run_file import load_run
from quartet.cli.their_engine import TheirEngine, engine_of, has_two_gpus

EMBEDDED = TheirEngine("embedded")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The interpreter of `make install-vllm`, where the command is typed on a machine with a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(their_engine, "has_driver", lambda: True)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    python = tmp_path / their_engine.VLLM_PYTHON
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_a_word_about_it_wins(installed: Path) -> None:
    """their_engine.py 1"""
    said = TheirEngine("embedded", is_chosen=False)
    assert engine_of({"inference": {"engine": "vllm"}}, {"inference": {"engine": "embedded"}}) == said


def test_the_interpreter_that_has_vllm_samples(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """their_engine.py 2"""
    assert engine_of({}) == TheirEngine("vllm", python=str(installed))
    assert engine_of({"inference": {"python": str(installed)}}) == TheirEngine("vllm"), "the run names it"
    for other in (sys.executable, "no-such-python"):
        assert engine_of({"inference": {"python": other}}) == EMBEDDED
    monkeypatch.setattr(their_engine, "has_driver", lambda: False)
    assert engine_of({}) == EMBEDDED, "a file of theirs asks for GPUs"


def test_a_run_names_the_interpreter_that_was_found(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """their_engine.py 2, 3"""
    Path("theirs.toml").write_text(TASKSETS)
    inference = load_run(["@", "theirs.toml"]).config.inference
    assert (inference["engine"], inference["python"], inference["gpus"]) == ("vllm", str(installed), 6)
    assert "sampled by" not in capsys.readouterr().err
    config = load_run(["@", "theirs.toml", "--inference.python", sys.executable]).config
    assert (config.inference["engine"], config.inference["python"]) == ("embedded", sys.executable)
    assert "sampled by the embedded engine: " in capsys.readouterr().err
    load_run(["@", "theirs.toml", "--inference.engine", "embedded"])
    assert "sampled by" not in capsys.readouterr().err, "somebody said so"


def test_gpus_that_are_shown_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(their_engine, "_DEVICE_FILES", (tmp_path, "nvidia[0-9]*"))
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert has_two_gpus()
    for shown, two in (("0,1", True), ("1", False), ("", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert has_two_gpus() == two
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia1").unlink()
    assert not has_two_gpus()
