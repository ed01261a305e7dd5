"""A host that reaches no inference says so while its rollouts wait: real host, real worker, over gRPC."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import hosting
import pytest
import scripted_inference
from loopback import LOOPBACK
from quartet.kit.stream import with_heartbeats
from quartet.v1 import envhost_service_pb2
from quartet_envhost import service


async def test_rollouts_wait_for_inference_and_the_host_says_why_until_it_is_there(
    envs_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """worker.py 5"""
    monkeypatch.setattr(service, "with_heartbeats", partial(with_heartbeats, interval_s=0.1))
    policy = scripted_inference.ScriptedInference()
    inference = await scripted_inference.serve_scripted(policy, f"{LOOPBACK}:0")  # the port is taken again
    settings = {"inference_addresses": [inference.address], "python": envs_python}
    request = envhost_service_pb2.RunRolloutsRequest(
        request_id="r",
        members=[0, 1],
        environment=envhost_service_pb2.EnvironmentRef(id="reverse-text"),
        timeout_ms=60_000,
    )
    said, ended = [], 0
    async with hosting.serving(settings) as (_, stub), asyncio.timeout(120):
        assert await rewards(stub, request) == 2
        await inference.stop(0)
        async for frame in stub.RunRollouts(request):
            if frame.HasField("rollout"):
                assert not frame.rollout.HasField("failure")
                ended += 1
            elif frame.held_up and not said:
                said.append(frame.held_up)
                inference = await scripted_inference.serve_scripted(policy, inference.address)
    await inference.stop(0)
    assert ended == 2
    assert said[0].startswith(f"no replica of inference is in service ({inference.address}: ")


async def rewards(stub: Any, request: envhost_service_pb2.RunRolloutsRequest) -> int:
    """How many rollouts end well, of a host that has nothing to tell meanwhile."""
    frames = [frame async for frame in stub.RunRollouts(request)]
    assert not any(frame.held_up for frame in frames)
    return sum(frame.HasField("rollout") and not frame.rollout.HasField("failure") for frame in frames)
