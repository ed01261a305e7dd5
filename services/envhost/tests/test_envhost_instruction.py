"""`args.system_prompt`: what the model is told first. A file for a v1 taskset (Verifiers' own), a text for a
classic package: classic/instruction.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from quartet.errors import from_rpc
from quartet.v1 import envhost_service_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def prompts(host: Any, env_id: str, **args: Any) -> list[list[str]]:
    """System messages that reach the policy in one rollout of the first example."""
    host.policy.requests.clear()
    request = pb.RunRolloutsRequest(
        run_id="run", request_id=f"{env_id} {args}", members=[0], timeout_ms=20_000, messages_of_members=1,
        environment=pb.EnvironmentRef(id=env_id, args_json=json.dumps(args)),
    )  # fmt: skip
    stream = host.stub.RunRollouts(request, timeout=120)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    assert not rollout.HasField("failure"), rollout.failure
    return [
        [one.content for one in asked.messages.messages if one.role == "system"]
        for asked in host.policy.requests
    ]


async def test_a_v1_environments_own_system_prompt_is_replaced_by_a_file(hosted: Any, tmp_path: Path) -> None:
    (own,) = await prompts(hosted, "reverse-text")
    assert own[0].startswith("Reverse the text")
    file = tmp_path / "best_prompt.txt"
    file.write_text("Backwards.")
    assert await prompts(hosted, "reverse-text", system_prompt=str(file)) == [["Backwards."]]


async def test_a_classic_environment_is_given_one(classic: Any) -> None:
    assert await prompts(classic, "classic-env") == [[]]
    assert await prompts(classic, "classic-env", system_prompt="Be brief.") == [["Be brief."]]
    for bad in ("", 3):
        with pytest.raises(grpc.RpcError) as failed:
            await prompts(classic, "classic-env", system_prompt=bad)
        error = from_rpc(failed.value)
        assert error.reason == "INVALID_CONFIG" and "refuses args.system_prompt" in error.message
