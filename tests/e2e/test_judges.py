"""A judge that our own inference serves: a classic environment by the book asks it over OpenAI's API, while
another replica is the policy over gRPC.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from quartet.v1 import envhost_service_pb2, rollout_pb2
from quartet_envhost.config import EnvHostConfig
from quartet_envhost.host import EnvironmentHost

from tests.conftest import REPOSITORY
from tests.forked_services import Forks, Process, listening

PYTHON = REPOSITORY / ".venv-envs-classic/bin/python"
ENVIRONMENTS = REPOSITORY / "services/envhost/tests/envs"
SECONDS = 120.0


@contextmanager
def replica(forks: Forks, model: Path, folder: Path) -> Iterator[tuple[Process, str, str]]:
    """A replica with both of its fronts: the process, its gRPC address and its URL."""
    folder.mkdir()
    grpc_port, openai_port, log = folder / "grpc", folder / "openai", folder / "log"
    words = ["--model", str(model), "--engine", "embedded"]
    words += ["--server.address", "127.0.0.1:0", "--server.port_file", str(grpc_port)]
    words += ["--openai.address", "127.0.0.1:0", "--openai.port_file", str(openai_port)]
    process = forks.start("inference", words, log)
    with listening(process, log, grpc_port, openai_port):
        yield process, grpc_port.read_text().strip(), f"http://{openai_port.read_text().strip()}/v1"


async def rollouts(host: EnvironmentHost, url: str, members: int) -> list[Any]:
    """A group of the judged environment."""
    args = {"kind": "judge", "judge_url": url, "judge_model": "model"}
    request = envhost_service_pb2.RunRolloutsRequest(
        request_id=os.urandom(4).hex(),
        environment={"id": "book-classic", "args_json": json.dumps(args)},
        members=range(members),
        sampling={"max_tokens": 8},
        timeout_ms=90_000,
    )
    async with asyncio.timeout(SECONDS):
        return [rollout async for rollout in host.run(request)]


@pytest.mark.slow
async def test_a_judge_is_our_own_inference(random_model: Path, tmp_path: Path, forks: Forks) -> None:
    """Invariant 5: what it says is the reward; where it is gone, a rollout fails as SCORER and earns no 0."""
    if not os.access(PYTHON, os.X_OK):
        pytest.skip("no interpreter of classic environments; `make classic` makes it")
    # Two replicas, so that the judge can be away while the policy is there.
    with (
        replica(forks, random_model, tmp_path / "policy") as (_, policy, _),
        replica(forks, random_model, tmp_path / "judge") as (process, _, url),
    ):
        environment = {"env": {"PYTHONPATH": str(ENVIRONMENTS), "JUDGE_API_KEY": "none"}}
        host = EnvironmentHost(
            EnvHostConfig.model_validate(
                {
                    "inference_addresses": [policy],
                    "python": str(PYTHON),
                    "environments": {"book-classic": environment},
                }
            )
        )
        try:
            judged = await rollouts(host, url, 4)
            assert not any(one.HasField("failure") for one in judged), [one.failure for one in judged]
            assert [one.rewards["heard"] for one in judged] == [1.0] * 4
            process.kill()
            process.wait()
            unjudged = await rollouts(host, url, 2)
            assert {one.failure.kind for one in unjudged} == {rollout_pb2.FAILURE_KIND_SCORER}
            assert all("heard" in one.failure.message and one.samples for one in unjudged)
        finally:
            await host.close()
