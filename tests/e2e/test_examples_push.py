"""examples/weights_from_elsewhere as its README runs it: plain PyTorch, and a replica that takes weights."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from quartet.errors import QuartetError

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "examples/weights_from_elsewhere"
SECONDS = 120
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The tiny model with random weights: it answers nothing yet."""
    import torch
    from quartet.cli.tiny.files import write_model_files
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "model"
    write_model_files(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.fixture
def replica(model: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Addresses of the example's replica: gRPC, and OpenAI's API."""
    grpc_port, openai_port = tmp_path / "grpc", tmp_path / "openai"
    command = [sys.executable, "-m", "quartet_inference", "@", str(EXAMPLE / "inference.toml")]
    command += ["--model", str(model), "--server.address", "127.0.0.1:0", "--openai.address", "127.0.0.1:0"]
    command += ["--server.port_file", str(grpc_port), "--openai.port_file", str(openai_port)]
    with subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT) as process:
        deadline = time.monotonic() + SECONDS
        while not (grpc_port.exists() and openai_port.exists()):
            assert process.poll() is None and time.monotonic() < deadline, "the replica did not start"
            time.sleep(0.05)
        yield grpc_port.read_text().strip(), f"http://{openai_port.read_text().strip()}/v1"
        process.terminate()


def test_pushed_weights_are_sampled_from(
    model: Path,
    replica: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Invariant 3: each answer comes from the version just pushed, and the last version knows its answer.

    As a command, and then in this process, which has imported already what it needs.
    """
    words = [str(EXAMPLE / "train.py"), "--model", str(model), "--push-every", "20"]
    words += ["--inference", replica[0], "--openai", replica[1]]
    command = [sys.executable, *words, "--steps", "40"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"step (\d+)  loss \S+  (.*), sampled by version (.*)", done.stdout)
    assert [(step, version) for step, _, version in lines] == [("20", "[20]"), ("40", "[40]")]
    assert lines[-1][1] == "'good day'", done.stdout

    def trained(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", [*words, *options])
        runpy.run_path(words[0], run_name="__main__")

    conflict = "SEQUENCE_CONFLICT: version 10 of run elsewhere comes after 40"
    with pytest.raises(QuartetError, match=conflict):
        trained("--steps", "10", "--push-every", "10")
    trained("--steps", "20", "--run", "second")
    assert "sampled by version [20]" in capsys.readouterr().out
