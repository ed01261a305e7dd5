"""Fixtures: an environment interpreter, a scripted policy, an environment host served over gRPC."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from quartet.sampled_by import Heard
from quartet.v1 import envhost_service_pb2
from quartet_envhost import process as process_module
from quartet_envhost.host import EnvironmentHost
from quartet_envhost.templates import Templates

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent


def _load(name: str) -> Any:
    """A module of this folder, imported under its own name by the tests."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scripted_inference = _load("scripted_inference")
rollout_outcomes = _load("rollout_outcomes")
scripted_rewards = _load("scripted_rewards")
_load("stand_in_workers")
hosting = _load("hosting")
forked_interpreter = _load("forked_interpreter")
Rewarded = _load("rewarded_host").Rewarded
MODES = hosting.modes("trial_env")


def python_of(variable: str, folder: str, command: str) -> str:
    """A Python of another folder, named by an environment variable where that is set."""
    python = os.environ.get(variable, str(ROOT / folder / "bin/python"))
    if not os.access(python, os.X_OK):
        pytest.skip(f"no interpreter of environments at {python}; `{command}` makes it")
    return python


@pytest.fixture(scope="session")
def envs_python() -> str:
    """An interpreter that has verifiers 0.4 and this package."""
    return python_of("QUARTET_ENVS_PYTHON", ".venv-envs", "make install")


@pytest.fixture(scope="session")
def classic_python() -> str:
    """An interpreter that has verifiers 0.3 and this package."""
    return python_of("QUARTET_ENVS_CLASSIC_PYTHON", ".venv-envs-classic", "make classic")


# The environments under envs/ that are of the v1 generation.
OF_TESTS = ("trial-env", "tool-env", "endless-env", "compare-env", "plain-env", "odd-env")


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
        fields.setdefault("timeout_ms", 30_000)
        fields.setdefault("task_index", MODES.index(mode))
        return envhost_service_pb2.RunRolloutsRequest(run_id="run", environment=self.ref(env_id), **fields)

    def ref(self, env_id: str) -> Any:
        """The environment with the arguments that all tests share."""
        args = f'{{"once_file": "{self.once_file}"}}' if env_id == "trial-env" else ""
        return envhost_service_pb2.EnvironmentRef(id=env_id, args_json=args)

    async def run(self, mode: str, **fields: Any) -> list[Any]:
        """The rollouts of one request to the trial environment, in the order of their end."""
        stream = self.stub.RunRollouts(self.request("trial-env", mode, **fields), timeout=60)
        sampled_by = Heard()
        return [sampled_by.rollout(frame) async for frame in stream if frame.HasField("rollout")]

    @property
    def workers(self) -> list[Any]:
        """The live worker processes of the trial environment."""
        return [w for pool in self.host._pools.values() for w in pool.workers if pool.env_id == "trial-env"]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def templates_of_all() -> AsyncIterator[Any]:
    """What workers of hosts in any module are forked of, where these run in the loop of the session."""
    templates = hosting.LastingTemplates(300.0)
    yield templates
    await templates.end()


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for packages that a test writes, each of a name of its own."""
    return tmp_path_factory.mktemp("written")


@pytest.fixture(scope="session")
def path(written: Path) -> dict[str, Any]:
    """The settings of an environment that lies there, or under envs/: equal ones share a template."""
    return {"env": {"PYTHONPATH": os.pathsep.join((str(hosting.ENVIRONMENTS), str(written)))}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hosted(
    envs_python: str, tmp_path_factory: pytest.TempPathFactory, templates_of_all: Any, path: dict[str, Any]
) -> AsyncIterator[Hosted]:
    """A running host; its workers are shared by the tests of a module."""
    policy = scripted_inference.ScriptedInference()
    inference = await scripted_inference.serve_scripted(policy)
    settings = {
        "inference_addresses": [inference.address],
        "python": envs_python,
        "max_in_flight": 64,
        "deadline_grace_seconds": 2.0,
        "environments": dict.fromkeys((*OF_TESTS, "reverse-text"), path),
    }
    async with hosting.serving(settings, templates_of_all) as (host, stub):
        yield Hosted(host, stub, policy, tmp_path_factory.mktemp("envhost") / "once")
    await inference.stop(0)


class Classic:
    """A host of classic environments, its policy and a client."""

    modes = hosting.modes("classic_env")

    def __init__(self, host: EnvironmentHost, stub: Any, policy: Any) -> None:
        self.host, self.stub, self.policy = host, stub, policy

    def request(
        self,
        mode: str = "ok",
        args: dict[str, Any] | None = None,
        env_id: str = "owner/classic-env",
        **fields: Any,
    ) -> Any:
        """A RunRolloutsRequest for a task of the classic trial environment, named by its mode."""
        fields = {"request_id": os.urandom(6).hex(), "members": [0], "timeout_ms": 40_000, **fields}
        fields.setdefault("task_index", self.modes.index(mode))
        environment = {"id": env_id, "args_json": json.dumps(args or {})}
        return envhost_service_pb2.RunRolloutsRequest(run_id="run", environment=environment, **fields)

    async def run(self, mode: str = "ok", args: dict[str, Any] | None = None, **fields: Any) -> list[Any]:
        """The rollouts of one request, in the order of their end."""
        stream = self.stub.RunRollouts(self.request(mode, args, **fields), timeout=90)
        sampled_by = Heard()
        return [sampled_by.rollout(frame) async for frame in stream if frame.HasField("rollout")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def classic(classic_python: str, templates_of_all: Any, path: dict[str, Any]) -> AsyncIterator[Classic]:
    """A running host whose default interpreter is a classic one."""
    policy = scripted_inference.ScriptedInference()
    inference = await scripted_inference.serve_scripted(policy)
    settings = {
        "inference_addresses": [inference.address],
        "python": classic_python,
        "deadline_grace_seconds": 2.0,
        "environments": {
            "classic-env": {**path, "rollouts_per_worker": 16},
            **dict.fromkeys(("unloadable-env", "numpy"), path),
        },
    }
    async with hosting.serving(settings, templates_of_all) as (host, stub):
        yield Classic(host, stub, policy)
    await inference.stop(0)


@pytest.fixture(autouse=True)
def _fresh_policy(request: pytest.FixtureRequest) -> None:
    """The policy behaves at the start of every test."""
    for name in {"hosted", "classic", "book"} & set(request.fixturenames):
        request.getfixturevalue(name).policy.behave()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_rewarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """A host on an interpreter without Verifiers; its worker is shared by the tests of this module."""
    assert importlib.util.find_spec("verifiers") is None, "this interpreter is to have none"
    policy, rewards = scripted_inference.ScriptedInference(), scripted_rewards.ScriptedRewards()
    inference = await scripted_inference.serve_scripted(policy)
    service = await scripted_rewards.serve_rewards(
        rewards, f"unix:{tmp_path_factory.mktemp('rewards')}/rewards.sock"
    )
    settings = {
        "inference_addresses": [inference.address],
        "python": sys.executable,
        # No worker hangs here: a machine that stands still for seconds is to be no reason to end one.
        "deadline_grace_seconds": 20.0,
        "rollouts_per_worker": 16,
    }
    async with hosting.serving(settings) as (host, stub):
        yield Rewarded(host, stub, policy, rewards, service.address)
    await service.stop(0)
    await inference.stop(0)


@pytest.fixture
def rewarded(shared_rewarded: Any) -> Any:
    """Everybody behaves at the start of every test."""
    shared_rewarded.policy.behave()
    shared_rewarded.rewards.behave()
    return shared_rewarded


@pytest_asyncio.fixture(loop_scope="module")
async def own(rewarded: Any) -> AsyncIterator[Any]:
    """With a service of its own, which has to be loaded anew."""
    rewards = scripted_rewards.ScriptedRewards()
    service = await scripted_rewards.serve_rewards(rewards)
    yield Rewarded(rewarded.host, rewarded.stub, rewarded.policy, rewards, service.address)
    await service.stop(0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_service(shared_rewarded: Any) -> AsyncIterator[Any]:
    """With a service that is loaded once for all tests of a module, which have its prompts in common."""
    rewards = scripted_rewards.ScriptedRewards()
    service = await scripted_rewards.serve_rewards(rewards)
    yield Rewarded(
        shared_rewarded.host, shared_rewarded.stub, shared_rewarded.policy, rewards, service.address
    )
    await service.stop(0)


@pytest.fixture
def lasting(rewarded: Any, module_service: Any) -> Any:
    """That service; it behaves, too."""
    module_service.rewards.behave()
    return module_service


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whose workers are forked. A busy machine takes longer than that to end one."""
    monkeypatch.setattr(process_module, "EXIT_GRACE_S", forked_interpreter.SECONDS)
    return forked_interpreter.Interpreter(tmp_path)


@pytest_asyncio.fixture
async def templates() -> AsyncIterator[Templates]:
    """For workers of `interpreter`; none of their processes is left."""
    made = Templates(forked_interpreter.SECONDS)
    before = forked_interpreter.children()
    yield made
    await made.close()
    # Nor any that waits to be collected.
    await asyncio.wait_for(
        rollout_outcomes.until(lambda: forked_interpreter.children() <= before), forked_interpreter.SECONDS
    )
