"""examples/rl_loop and examples/node_client as their READMEs run them: loops of one's own upon services,
without an orchestrator. One is a program of JavaScript, which needs trainer and inference alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from quartet.errors import QuartetError, refused
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import envhost_service_pb2 as e
from quartet.v1 import trainer_service_pb2 as t
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceServicer, add_EnvHostServiceServicer_to_server
from quartet.v1.rollout_pb2 import Rollout, Sample
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceServicer, add_TrainerServiceServicer_to_server
from safetensors.numpy import load_file

from tests.conftest import REPOSITORY
from tests.e2e.conftest import service
from tests.forked_services import Forks

EXAMPLE = REPOSITORY / "examples/rl_loop/train.py"
OF_NODE = REPOSITORY / "examples/node_client"
ENVS = os.environ.get("QUARTET_ENVS_PYTHON", str(REPOSITORY / ".venv-envs/bin/python"))
SECONDS, NODE_SECONDS = 240, 120
STEPS, NODE_STEPS = 6, 12
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
NODE = shutil.which("node")

# npm writes it when all of them are there.
PACKAGES = OF_NODE / "node_modules/.package-lock.json"


@pytest.fixture(scope="module")
def services(
    tiny_model: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Addresses of those that the examples speak to, one behind the other: inference follows the run that
    was created last."""
    folder = tmp_path_factory.mktemp("services")
    with ExitStack() as stack:

        def started(name: str, *options: str | Path) -> str:
            return stack.enter_context(service(forks, name, folder, *options))

        trainer = started("trainer", "--state_dir", folder / "state")
        inference = started("inference", "--model", tiny_model, "--weights_address", trainer)
        envhost = started("envhost", "--python", ENVS, "--inference_addresses", f'["{inference}"]')
        yield {"trainer": trainer, "inference": inference, "envhost": envhost}


def loaded() -> Any:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.mark.slow
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

    again = asyncio.run(
        loaded().train(
            "mine",
            model=str(tiny_model),
            steps=1,
            trainer_address=services["trainer"],
            envhost_address=services["envhost"],
        )
    )
    number, before = (int(re.findall(r"@(\d+)/model$", one)[0]) for one in (again, folder))
    assert number == before + 5, "published, learned, stepped, published, saved"


class Trainer(TrainerServiceServicer):
    """Has a call of a cell that was interrupted under way when it is asked first, and takes no batch."""

    def __init__(self) -> None:
        self.published: list[int] = []

    async def CreateRun(self, request: Any, context: Any) -> Any:
        return t.CreateRunResponse(run={"applied_seq_id": 6 + len(self.published)})

    async def PublishWeights(self, request: Any, context: Any) -> Any:
        self.published.append(request.seq_id)
        if len(self.published) == 1:
            raise QuartetError("SEQUENCE_CONFLICT", "7 was sent with other contents before")
        return t.PublishWeightsResponse(version=3)

    async def ForwardBackward(self, requests: Any, context: Any) -> Any:
        await anext(requests)
        raise refused("loss", "cispo", "send another one")


class Host(EnvHostServiceServicer):
    """Its rollouts fill a message, and writing that takes a while."""

    def __init__(self) -> None:
        self.listed = asyncio.Event()

    async def ListEnvironments(self, request: Any, context: Any) -> Any:
        self.listed.set()
        return e.ListEnvironmentsResponse()

    async def RunRollouts(self, request: Any, context: Any) -> AsyncIterator[e.RunRolloutsResponse]:
        sample = Sample(token_ids=range(20_000), logprobs=[0.0])
        for member in request.members:
            yield e.RunRolloutsResponse(rollout=Rollout(member=member, samples=[sample]))


async def test_a_loop_of_ones_own_waits_for_a_call_that_is_under_way_and_tells_what_is_refused() -> None:
    """Also of a refusal while samples are sent; and the host is waited for before anything is asked of it."""
    trainer, host = Trainer(), Host()
    served = [
        Service("quartet.v1.TrainerService", add_TrainerServiceServicer_to_server, trainer),
        Service("quartet.v1.EnvHostService", add_EnvHostServiceServicer_to_server, host),
    ]
    running = await start(served, ServerConfig(), Health())
    here = {"trainer_address": running.address, "envhost_address": running.address}
    with pytest.raises(QuartetError) as told:
        await loaded().train("mine", steps=1, **here)
    assert (told.value.reason, trainer.published) == ("INVALID_REQUEST", [7, 8]) and host.listed.is_set()
    await running.stop(0)


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
    code = f"import {{ client, ready }} from '{(OF_NODE / 'quartet.mjs').as_uri()}';"
    code += f"await ready(client('TrainerService', '{address}'), 3).catch((e) => console.log(e.message));"
    command = [NODE, "--input-type=module", "-e", code]
    done = subprocess.run(command, cwd=OF_NODE, capture_output=True, text=True, timeout=NODE_SECONDS)
    assert done.stderr.startswith(f"waiting for TrainerService at {address}"), done.stderr
    assert done.stdout.startswith(f"TrainerService at {address} is not there after 3 s: "), done.stdout


@pytest.mark.slow
@without_node
@without_packages
def test_a_program_of_javascript_learns(tiny_model: Path, services: dict[str, str], tmp_path: Path) -> None:
    """Every step by the newest weights, and in the end the very weights that the trainer exported."""
    assert NODE is not None
    fetched = tmp_path / "fetched.safetensors"
    command = [NODE, str(OF_NODE / "train.mjs"), "--model", str(tiny_model), "--steps", str(NODE_STEPS)]
    command += ["--weights", str(fetched)]
    command += [f"--{name}={services[name]}" for name in ("trainer", "inference")]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=NODE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(reward) for reward in re.findall(r"^step \d+  reward (\S+)", done.stdout, re.MULTILINE)]
    assert len(rewards) == NODE_STEPS and rewards[-1] > rewards[0] + 0.2, done.stdout
    (folder,) = re.findall(r"^model (.*)$", done.stdout, re.MULTILINE)
    exported, own = load_file(Path(folder) / "model.safetensors"), load_file(fetched)
    assert exported.keys() == own.keys()
    assert all((exported[name] == own[name]).all() for name in own)


def test_its_packages_are_pinned() -> None:
    wanted = json.loads((OF_NODE / "package.json").read_text())["dependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())
    locked = json.loads((OF_NODE / "package-lock.json").read_text())["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
