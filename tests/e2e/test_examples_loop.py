"""examples/rl_loop as its README runs it: a loop upon three services, without an orchestrator."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.conftest import service

pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "examples/rl_loop/train.py"
ENVS = os.environ.get("QUARTET_ENVS_PYTHON", str(REPOSITORY / ".venv-envs/bin/python"))
SECONDS = 240
STEPS = 6
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def services(tiny_model: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Addresses of those that the example speaks to."""
    with ExitStack() as stack:

        def started(name: str, *options: str | Path) -> str:
            return stack.enter_context(service(name, tmp_path, *options))

        trainer = started("trainer", "--state_dir", tmp_path / "state")
        inference = started("inference", "--model", tiny_model, "--weights_address", trainer)
        envhost = started("envhost", "--python", ENVS, "--inference_addresses", f'["{inference}"]')
        yield {"trainer": trainer, "envhost": envhost}


def test_a_loop_of_ones_own_learns(tiny_model: Path, services: dict[str, str]) -> None:
    """As a command, and then from the saved state in a loop of asyncio that runs already, as a notebook's."""
    command = [sys.executable, str(EXAMPLE), "--model", str(tiny_model), "--steps", str(STEPS)]
    command += ["--trainer", services["trainer"], "--envhost", services["envhost"]]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(reward) for reward in re.findall(r"^step \d+  reward (\S+)", done.stdout, re.MULTILINE)]
    assert len(rewards) == STEPS and max(rewards[-3:]) > rewards[0] + 0.2, done.stdout
    (folder,) = re.findall(r"^model (.*)$", done.stdout, re.MULTILINE)
    assert (Path(folder) / "model.safetensors").is_file()

    spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    again = asyncio.run(
        example.train(
            "mine",
            model=str(tiny_model),
            steps=1,
            trainer_address=services["trainer"],
            envhost_address=services["envhost"],
        )
    )
    number, before = (int(re.findall(r"@(\d+)/model$", one)[0]) for one in (again, folder))
    assert number == before + 5, "published, learned, stepped, published, saved"
