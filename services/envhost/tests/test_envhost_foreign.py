"""A classic environment that was not written for this project, as its author published it on PyPI.

sophistry-bench-sprint: arguments for an answer about a text, scored by the claims made and the quotes that
are in the text. Nothing was changed for it, here or there. For verifiers 0.4 no package was found that needs
no services elsewhere; test_envhost_episodes.py runs an environment that Verifiers itself brings.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hosting import serving
from quartet.v1 import envhost_service_pb2 as pb
from scripted_inference import ScriptedInference, serve_scripted

ENVIRONMENT = pb.EnvironmentRef(id="sophistry-bench-sprint", args_json='{"n_items": 4}')
METRICS = ["correctness_reward", "n_citations_metric", "n_claims_metric", "num_turns"]


@pytest.fixture
def installed(classic_python: str, tmp_path: Path) -> Path:
    """A folder that has the package as PyPI has it."""
    requirements = Path(__file__).with_name("foreign-classic.txt")
    flags = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--target", str(tmp_path)]
    command = [classic_python, "-m", "pip", "install", "-q", *flags, "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        assert "DO NOT MATCH THE HASHES" not in done.stderr
        pytest.skip(f"no index to install from: {done.stderr[-300:]}")
    return tmp_path


def quoting(request: Any, last: str) -> str:
    """Eight claims, each with the same line of the text as its proof."""
    text = request.messages.messages[0].content.split("PASSAGE:")[1]
    line = next(line.strip() for line in text.splitlines() if line.strip().replace(" ", "").isalpha())
    assert len(line) > 12, "shorter quotes prove nothing there"
    return f"<claim>So it is.</claim><cite>{line}</cite>" * 8


@pytest.mark.slow
async def test_a_package_from_pypi_runs_unchanged(installed: Path, classic_python: str) -> None:
    policy = ScriptedInference()
    inference = await serve_scripted(policy)
    settings = {
        "inference_addresses": [inference.address],
        "python": classic_python,
        "environments": {ENVIRONMENT.id: {"env": {"PYTHONPATH": str(installed)}}},
    }
    async with serving(settings) as (_, stub):
        described = pb.DescribeEnvironmentRequest(environment=ENVIRONMENT)
        info = (await stub.DescribeEnvironment(described, timeout=120)).environment
        assert (info.api, info.version, info.train_size) == ("classic", "0.1.6", 8)
        assert list(info.rewards) == ["aggregate_reward"] and set(METRICS) < set(info.metrics)
        listed = pb.GetTasksRequest(environment=ENVIRONMENT, count=8, include_data=True)
        tasks = (await stub.GetTasks(listed, timeout=60)).tasks
        gold = [json.loads(task.data_json)["info"]["is_gold"] for task in tasks]
        earned = {}
        for name, answer in (("quotes", quoting), ("says nothing", lambda request, last: "No.")):
            policy.answer = answer
            for task in tasks[:2]:
                request = pb.RunRolloutsRequest(
                    run_id="run",
                    request_id=f"{name} {task.index}",
                    environment=ENVIRONMENT,
                    task_index=task.index,
                    members=range(4),
                    timeout_ms=20_000,
                )
                stream = stub.RunRollouts(request, timeout=60)
                rollouts = [frame.rollout async for frame in stream if frame.HasField("rollout")]
                assert len(rollouts) == 4 and not any(one.HasField("failure") for one in rollouts), rollouts
                assert {one.metrics["correctness_reward"] for one in rollouts} == {float(gold[task.index])}
                (earned[name, task.index],) = {(r.reward, r.metrics["n_claims_metric"]) for r in rollouts}
    await inference.stop(0)
    assert gold == [True, False] * 4
    assert {earned["quotes", task] for task in (0, 1)} == {(1.0, 8.0)}
    assert {earned["says nothing", task] for task in (0, 1)} == {(0.5, 0.0)}
