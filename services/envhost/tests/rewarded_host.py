"""A host, its policy, and the RewardService that it plays, as tests ask them."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from quartet.sampled_by import Heard
from quartet.v1 import envhost_service_pb2 as epb
from quartet_envhost.config import STALL_S
from quartet_envhost.own_code import OwnCode
from quartet_envhost.rewarded.environment import HostedEnvironment
from scripted_rewards import ScriptedRewards


class Rewarded:
    """A host, its policy, and the service that it plays."""

    def __init__(self, host: Any, stub: Any, policy: Any, rewards: ScriptedRewards, address: str) -> None:
        self.host, self.stub, self.policy = host, stub, policy
        self.rewards, self.address = rewards, address

    def ref(self, **args: Any) -> epb.EnvironmentRef:
        """The environment, at the service's address."""
        args = {"address": self.address, **args}
        return epb.EnvironmentRef(id="reward-service", args_json=json.dumps(args))

    def request(self, index: int = 0, **fields: Any) -> epb.RunRolloutsRequest:
        """For a prompt by its number."""
        fields = {
            "request_id": os.urandom(6).hex(),
            "members": [0],
            "timeout_ms": 20_000,
            "environment": self.ref(),
            **fields,
        }
        return epb.RunRolloutsRequest(run_id="run", task_index=index, **fields)

    async def run(self, index: int = 0, **fields: Any) -> list[Any]:
        """The rollouts of one request, by member."""
        stream = self.stub.RunRollouts(self.request(index, **fields), timeout=60)
        sampled_by = Heard()
        found = [sampled_by.rollout(frame) async for frame in stream if frame.HasField("rollout")]
        return sorted(found, key=lambda rollout: rollout.member)

    async def describe(self, ref: epb.EnvironmentRef | None = None) -> epb.EnvironmentInfo:
        request = epb.DescribeEnvironmentRequest(environment=ref or self.ref())
        info: epb.EnvironmentInfo = (await self.stub.DescribeEnvironment(request, timeout=60)).environment
        return info

    async def loaded(self, ref: epb.EnvironmentRef | None = None) -> epb.EnvironmentInfo:
        """What a new worker finds, of what it would load, in this process. Raises QuartetError."""
        ref = ref or self.ref()
        environment = HostedEnvironment(ref.id, json.loads(ref.args_json), OwnCode(ref.id))
        async with environment.serving(STALL_S, pytest.fail):
            return await environment.describe()

    async def tasks(self, **fields: Any) -> list[Any]:
        request = epb.GetTasksRequest(**{"environment": self.ref(), "count": 100, **fields})
        return list((await self.stub.GetTasks(request, timeout=60)).tasks)
