"""Fixtures: an environment interpreter, a scripted policy, an environment host served over gRPC."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import envhost_service_pb2, envhost_service_pb2_grpc
from quartet_envhost.config import EnvHostConfig
from quartet_envhost.host import EnvironmentHost
from quartet_envhost.service import SERVICE_NAME, EnvHostServicer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent

_spec = importlib.util.spec_from_file_location("scripted_inference", HERE / "scripted_inference.py")
assert _spec is not None and _spec.loader is not None
scripted_inference = importlib.util.module_from_spec(_spec)
sys.modules["scripted_inference"] = scripted_inference
_spec.loader.exec_module(scripted_inference)


@pytest.fixture(scope="session")
def envs_python() -> str:
    """An interpreter that has verifiers and this package."""
    python = os.environ.get("QUARTET_ENVS_PYTHON", str(ROOT / ".venv-envs/bin/python"))
    if not os.access(python, os.X_OK):
        pytest.skip(f"no environment interpreter at {python}; `make install` makes it")
    return python


@dataclass
class Hosted:
    """A host under test with its policy and a client."""

    host: EnvironmentHost
    stub: Any
    policy: Any
    once_file: Path

    def request(self, env_id: str, mode: str = "ok", **fields: Any) -> Any:
        """A RunRolloutsRequest for a task of the trial environment, named by its mode."""
        fields.setdefault("request_id", os.urandom(6).hex())
        fields.setdefault("members", [0])
        fields.setdefault("timeout_ms", 10_000)
        fields.setdefault("task_index", MODES.index(mode))
        return envhost_service_pb2.RunRolloutsRequest(run_id="run", environment=self.ref(env_id), **fields)

    def ref(self, env_id: str) -> Any:
        """The environment with the arguments that all tests share."""
        args = f'{{"once_file": "{self.once_file}"}}' if env_id == "trial-env" else ""
        return envhost_service_pb2.EnvironmentRef(id=env_id, args_json=args)

    async def run(self, mode: str, **fields: Any) -> list[Any]:
        """The rollouts of one request to the trial environment, in the order of their end."""
        stream = self.stub.RunRollouts(self.request("trial-env", mode, **fields), timeout=60)
        return [frame.rollout async for frame in stream if frame.HasField("rollout")]

    @property
    def workers(self) -> list[Any]:
        """The live worker processes of the trial environment."""
        return [w for pool in self.host._pools.values() for w in pool._workers if pool.env_id == "trial-env"]


_source = (HERE / "envs/trial_env/__init__.py").read_text()
MODES: tuple[str, ...] = eval(
    _source[_source.index("MODES = ") + 8 : _source.index(")", _source.index("MODES = ")) + 1]
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosted(envs_python: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hosted]:
    """A running host; its workers are shared by the tests of a module."""
    policy = scripted_inference.ScriptedInference()
    inference = await scripted_inference.serve_scripted(policy)
    config = EnvHostConfig.model_validate(
        {
            "inference_addresses": [inference.address],
            "python": envs_python,
            "max_in_flight": 64,
            "deadline_grace_seconds": 0.5,
            "environments": {
                "trial-env": {"env": {"PYTHONPATH": str(HERE / "envs")}},
                "tool-env": {"env": {"PYTHONPATH": str(HERE / "envs")}},
                "endless-env": {"env": {"PYTHONPATH": str(HERE / "envs")}},
                "reverse-text": {},
            },
        }
    )
    host = EnvironmentHost(config)
    health = Health()
    health.set_ready(SERVICE_NAME)
    add: Any = envhost_service_pb2_grpc.add_EnvHostServiceServicer_to_server
    server = await start([Service(SERVICE_NAME, add, EnvHostServicer(host))], ServerConfig(), health)
    async with connect(server.address) as channel:
        make_stub: Any = envhost_service_pb2_grpc.EnvHostServiceStub
        yield Hosted(host, make_stub(channel), policy, tmp_path_factory.mktemp("envhost") / "once")
    await server.stop(0)
    await host.close()
    await inference.stop(0)


@pytest.fixture(autouse=True)
def _fresh_policy(request: pytest.FixtureRequest) -> None:
    """The policy behaves at the start of every test."""
    if "hosted" in request.fixturenames:
        policy = request.getfixturevalue("hosted").policy
        policy.answer = scripted_inference.reverse
        policy.delay_s = 0.0
        policy.errors.clear()
        policy.requests.clear()
        policy.forgets = False
        policy.torn = 0
