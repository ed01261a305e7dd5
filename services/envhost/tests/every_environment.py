"""Every environment of environments/ through the host's own loader and Verifiers' own rollout loop, played by
an oracle that earns everything and by a policy that does not. test_every_environment.py runs it, in the
interpreter of the environments.

The policy is a script behind a real InferenceService; what reaches it is what a model would see.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quartet.kit.channel import ClientSecurity
from quartet.kit.imports import uncollected
from quartet.replicas import Replicas
from quartet.v1.envhost_service_pb2 import SPLIT_EVAL, EnvironmentRef, GetTasksRequest, RunRolloutsRequest
from quartet_envhost.config import STALL_S
from quartet_envhost.joining import FirstTurns
from quartet_envhost.own_code import OwnCode
from quartet_envhost.sampler import ReplicaSampler

with uncollected():
    from quartet_envhost.v1.environment import HostedEnvironment

ROOT = Path(__file__).resolve().parents[3]
TASKS = 4

_spec = importlib.util.spec_from_file_location(
    "scripted_inference", Path(__file__).with_name("scripted_inference.py")
)
assert _spec is not None and _spec.loader is not None
scripted_inference = importlib.util.module_from_spec(_spec)
sys.modules["scripted_inference"] = scripted_inference
_spec.loader.exec_module(scripted_inference)

# environment: arguments that keep it small, the turns of its oracle
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "reverse-text": ({}, 1),
    "alphabet-sort": ({"min_turns": 3}, 3),
    "gsm8k": ({"num_train_examples": 20}, 1),
    "math-python": ({"num_train": 20}, 3),
    "wiki-search": ({}, 4),
    "wordle": ({}, 2),
}


def environments() -> list[str]:
    """The ids of the packages."""
    found = ROOT.glob("environments/*/pyproject.toml")
    return sorted(file.parent.name.replace("_", "-") for file in found)


def test_every_environment_has_a_case() -> None:
    assert set(CASES) == set(environments())


@pytest.mark.parametrize("env_id", sorted(CASES))
async def test_the_oracle_earns_everything_and_a_wrong_answer_does_not(env_id: str) -> None:
    args, turns = CASES[env_id]
    oracle = importlib.import_module(f"{env_id.replace('-', '_')}.oracle")
    environment = HostedEnvironment(env_id, args, OwnCode(env_id))
    wanted = GetTasksRequest(start=0, count=TASKS, include_data=True)
    data = [json.loads(task.data_json) for task in (await environment.tasks(wanted)).tasks]
    assert len(data) == TASKS
    held_out = GetTasksRequest(split=SPLIT_EVAL, start=0, count=TASKS)
    keys = {task.key for task in (await environment.tasks(wanted)).tasks}
    assert not keys & {task.key for task in (await environment.tasks(held_out)).tasks}, "splits share no task"
    policy = scripted_inference.ScriptedInference()
    inference = await scripted_inference.serve_scripted(policy)
    try:
        async with (
            Replicas([inference.address], ClientSecurity()) as replicas,
            environment.serving(STALL_S, pytest.fail),
        ):
            for index, one in enumerate(data):
                policy.answer = script(oracle.answer, one)
                rollout = await run(environment, replicas, env_id, index)
                assert not rollout.HasField("failure"), rollout.failure
                assert rollout.reward == pytest.approx(getattr(oracle, "FULL_REWARD", 1.0)), rollout.messages
                assert sum(message.role == "assistant" for message in rollout.messages) == turns
                answers = "ground_truths" if env_id == "alphabet-sort" else "answer"
                assert json.loads(rollout.task_json)[answers] == one[answers]
                policy.answer = lambda request, last: "I do not know."
                rollout = await run(environment, replicas, env_id, index)
                assert not rollout.HasField("failure"), rollout.failure
                assert rollout.reward == 0.0
    finally:
        await inference.stop(0)


def script(answer: Callable[..., Any], data: dict[str, Any]) -> Callable[[Any, str], str]:
    """A package's oracle as the scripted replica asks for it: the conversation is kept here."""
    messages: list[dict[str, Any]] = []

    def say(request: Any, last: str) -> str:
        messages.append({"role": "tool" if messages else "user", "content": last})
        said = answer(data, messages)
        messages.append({"role": "assistant", "content": said})
        if isinstance(said, str):
            return said
        (call,) = said["tool_calls"]
        return f"call {call['name']} {json.dumps(call['arguments'])}"

    return say


async def run(environment: HostedEnvironment, replicas: Replicas, env_id: str, index: int) -> Any:
    """One rollout with its conversation."""
    request = RunRolloutsRequest(
        run_id="run", request_id=f"{env_id}-{index}", environment=EnvironmentRef(id=env_id), task_index=index,
        members=[0], messages_of_members=1, timeout_ms=60_000,
    )  # fmt: skip
    async with asyncio.timeout(60):
        with FirstTurns(replicas).member(request.request_id) as first:
            return await environment.run(ReplicaSampler(replicas, first), request)
