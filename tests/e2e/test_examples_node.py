"""examples/node_client as its README runs it: a program of JavaScript, with trainer and inference alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.conftest import REPOSITORY
from tests.e2e.conftest import service

EXAMPLE = REPOSITORY / "examples/node_client"
SECONDS = 120
STEPS = 12
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
NODE = shutil.which("node")

# npm writes it when all of them are there.
PACKAGES = EXAMPLE / "node_modules/.package-lock.json"


@pytest.fixture
def services(tiny_model: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Addresses of a trainer, and of inference that follows it."""
    with (
        service("trainer", tmp_path, "--state_dir", tmp_path / "state") as trainer,
        service("inference", tmp_path, "--model", tiny_model, "--weights_address", trainer) as inference,
    ):
        yield {"trainer": trainer, "inference": inference}


without_node = pytest.mark.skipif(
    NODE is None, reason="node is not installed: examples/node_client is not run here"
)
without_packages = pytest.mark.skipif(
    not PACKAGES.is_file(),
    reason="the packages of examples/node_client are not there: npm ci --prefix examples/node_client",
)


@without_node
@without_packages
def test_a_service_that_is_not_there_yet_is_waited_for_by_name() -> None:
    assert NODE is not None
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    code = f"import {{ client, ready }} from '{(EXAMPLE / 'quartet.mjs').as_uri()}';"
    code += f"await ready(client('TrainerService', '{address}'), 3).catch((e) => console.log(e.message));"
    command = [NODE, "--input-type=module", "-e", code]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=SECONDS)
    assert done.stderr.startswith(f"waiting for TrainerService at {address}"), done.stderr
    assert done.stdout.startswith(f"TrainerService at {address} is not there after 3 s: "), done.stdout


@pytest.mark.slow
@without_node
@without_packages
def test_a_program_of_javascript_learns(tiny_model: Path, services: dict[str, str], tmp_path: Path) -> None:
    """Every step by the newest weights, and in the end the very weights that the trainer exported."""
    assert NODE is not None
    fetched = tmp_path / "fetched.safetensors"
    command = [NODE, str(EXAMPLE / "train.mjs"), "--model", str(tiny_model), "--steps", str(STEPS)]
    command += ["--weights", str(fetched)]
    command += [f"--{name}={address}" for name, address in services.items()]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(reward) for reward in re.findall(r"^step \d+  reward (\S+)", done.stdout, re.MULTILINE)]
    assert len(rewards) == STEPS and rewards[-1] > rewards[0] + 0.2, done.stdout
    (folder,) = re.findall(r"^model (.*)$", done.stdout, re.MULTILINE)
    exported, own = load_file(Path(folder) / "model.safetensors"), load_file(fetched)
    assert exported.keys() == own.keys()
    assert all((exported[name] == own[name]).all() for name in own)


def test_its_packages_are_pinned() -> None:
    wanted = json.loads((EXAMPLE / "package.json").read_text())["dependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())
    locked = json.loads((EXAMPLE / "package-lock.json").read_text())["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
