"""Mistakes that authors of v1 environments make, told in words that say what to change: a real host.

Invariants by their module: loading.py 2, own_code.py 2, worker.py 7, v1/tasks.py 2, v1/scoring.py,
v1/raised.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hosting import ENVIRONMENTS, serving
from quartet.v1 import envhost_service_pb2
from rollout_outcomes import kind, refusal

pytestmark = pytest.mark.asyncio(loop_scope="session")


def odd(*, mistake: str = "", **args: str) -> Any:
    args["mistake"] = mistake
    return envhost_service_pb2.EnvironmentRef(id="odd-env", args_json=json.dumps(args))


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"start": "raises"}, "in start: ConnectionError: no data base at db:5432"),
        ({"start": "exits"}, "in start: SystemExit: 3"),
        ({"mistake": "gives_none"}, "OddTaskset.load gave None: it returns its tasks"),
        ({"mistake": "is_async"}, "or yields them, and is no coroutine"),
        ({"mistake": "gives_data"}, "as example 1: each is a vf.Task, made of its data"),
    ],
)
async def test_what_keeps_it_from_loading_is_told(hosted: Any, args: dict[str, str], told: str) -> None:
    request = envhost_service_pb2.DescribeEnvironmentRequest(environment=odd(**args))
    refused = await refusal(hosted.stub.DescribeEnvironment(request, timeout=60))
    assert refused.reason == "ENVIRONMENT_UNAVAILABLE"
    assert refused.message.startswith("environment 'odd-env' does not load: ") and told in refused.message


async def test_an_argument_that_it_needs_is_named(hosted: Any) -> None:
    request = envhost_service_pb2.DescribeEnvironmentRequest(environment={"id": "odd-env"})
    refused = await refusal(hosted.stub.DescribeEnvironment(request, timeout=60))
    assert refused.reason == "INVALID_CONFIG" and refused.metadata["key"] == "args.mistake"
    assert "environment 'odd-env' needs args.mistake: it has no default" in refused.message


async def test_an_example_that_fits_into_no_message_is_named(hosted: Any) -> None:
    """At once: those behind it are not read for that."""
    request = envhost_service_pb2.GetTasksRequest(
        environment=odd(mistake="is_long"), start=0, count=2, include_data=True
    )
    refused = await refusal(hosted.stub.GetTasks(request, timeout=60))
    assert refused.reason == "INVALID_REQUEST"
    assert "example 0 of 'odd-env' has 5,000," in refused.message


async def rollouts(hosted: Any, mistake: str, members: int) -> list[Any]:
    request = hosted.request("odd-env", task_index=0, members=range(members))
    request.environment.CopyFrom(odd(mistake=mistake))
    stream = hosted.stub.RunRollouts(request, timeout=60)
    return [frame.rollout async for frame in stream if frame.HasField("rollout")]


async def test_a_reward_whose_name_is_no_text_is_told(hosted: Any) -> None:
    (rollout,) = await rollouts(hosted, "numbers_a_reward", 1)
    assert kind(rollout) == "SCORER"
    assert "reward right said {7: 1.0}: a name is a text" in rollout.failure.message


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("stops_raise", "stops_at_all: TaskError: hook stops_at_all: KeyError: 'at all'"),
        (
            "stops_raise_on_request",
            "stops_on_request: TaskError: hook stops_on_request: KeyError: 'on request'",
        ),
        ("stops_raise_on_answer", "stops_on_answer: TaskError: hook stops_on_answer: KeyError: 'on answer'"),
    ],
)
async def test_what_ends_a_rollout_and_raises_is_named_with_its_line(
    hosted: Any, mistake: str, told: str
) -> None:
    """v1/raised.py: whatever it looks at."""
    (rollout,) = await rollouts(hosted, mistake, 1)
    function = told.partition(":")[0]
    lines = (ENVIRONMENTS / "odd_env/__init__.py").read_text().splitlines()
    (at,) = [number for number, line in enumerate(lines, 1) if f"def {function}(" in line]
    assert kind(rollout) == "ENVIRONMENT" and not rollout.failure.retryable
    assert rollout.failure.message == f"odd_env/__init__.py:{at + 1} in {told}"


#: Packages that Python cannot read, and the line that is told.
UNREADABLE = {
    "unreadable_env": ({"__init__": "import os\n\ndef load(:\n"}, "unreadable_env/__init__.py:3 in <module>"),
    "unreadable_module_env": (
        {"__init__": "import unreadable_module_env.rewards\n", "rewards": "if True:\npass\n"},
        "unreadable_module_env/rewards.py:2 in <module>",
    ),
}


@pytest.mark.parametrize("what", UNREADABLE)
async def test_what_python_cannot_read_is_named_with_its_line(
    envs_python: str, templates_of_all: Any, written: Path, path: dict[str, Any], what: str
) -> None:
    """own_code.py 2: no frame is there."""
    modules, told = UNREADABLE[what]
    (written / what).mkdir()
    for name, text in modules.items():
        (written / what / f"{name}.py").write_text(text)
    env_id = what.replace("_", "-")
    settings = {
        "interact_only": True,
        "python": envs_python,
        "environments": {env_id: path},
    }
    async with serving(settings, templates_of_all) as (_, stub):
        request = envhost_service_pb2.DescribeEnvironmentRequest(environment={"id": env_id})
        refused = await refusal(stub.DescribeEnvironment(request, timeout=90))
    assert refused.reason == "ENVIRONMENT_UNAVAILABLE"
    assert f"{env_id!r} does not load: {told}: " in refused.message, refused.message
    assert "SyntaxError: invalid syntax" in refused.message or "IndentationError: " in refused.message


async def test_a_process_that_a_rollout_forked_is_no_worker(hosted: Any) -> None:
    """worker.py 7: it takes no frame of the worker, and no rollout fails for it."""
    for _ in range(3):
        found = await rollouts(hosted, "forks", 8)
        assert [kind(one) for one in found] == 8 * ["UNSPECIFIED"], [one.failure for one in found]
