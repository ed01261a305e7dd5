"""Mistakes that authors of v1 environments make, told in words that say what to change: a real host.

Invariants by their module: loading.py 2, worker.py 7, v1/tasks.py 2, v1/scoring.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from quartet.v1 import envhost_service_pb2
from rollout_outcomes import kind, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
    request = envhost_service_pb2.GetTasksRequest(
        environment=odd(mistake="is_long"), start=0, count=1, include_data=True
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


async def test_a_process_that_a_rollout_forked_is_no_worker(hosted: Any) -> None:
    """worker.py 7: it takes no frame of the worker, and no rollout fails for it."""
    for _ in range(3):
        found = await rollouts(hosted, "forks", 8)
        assert [kind(one) for one in found] == 8 * ["UNSPECIFIED"], [one.failure for one in found]
