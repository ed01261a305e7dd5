"""What can be asked of a host, what it refuses and how its calls end: real host, real workers, over gRPC.

Invariants by their module: active_request.py 1, host.py 2, v1/environment.py 1, 3 and 4.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.kit.channel import connect
from quartet.run.hosted import MAX_TIMEOUT_SECONDS
from quartet.v1 import envhost_service_pb2, envhost_service_pb2_grpc
from rollout_outcomes import kind, refusal, until
from scripted_inference import ScriptedInference, serve_scripted

pytestmark = pytest.mark.asyncio(loop_scope="session")
# Starting the first worker takes as long as the machine is busy.
STARTED_S = 60
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_descriptions_and_tasks(hosted: Any) -> None:
    ref = hosted.ref("owner/reverse-text")
    described = await hosted.stub.DescribeEnvironment(
        envhost_service_pb2.DescribeEnvironmentRequest(environment=ref), timeout=60
    )
    info = described.environment
    assert (info.api, info.verifiers_version[:4], info.version) == ("v1", "0.4.", "0.1.0")
    assert (info.train_size, info.eval_size, info.workers, info.max_members) == (2000, 200, 1, 64)
    assert (list(info.rewards), list(info.metrics)) == (["lcs_reward"], ["exact_match"])
    assert dict(info.weights) == {"lcs_reward": 1.0}

    async def tasks(split: int, start: int, count: int) -> list[Any]:
        request = envhost_service_pb2.GetTasksRequest(
            environment=ref, split=split, start=start, count=count, include_data=True
        )
        return list((await hosted.stub.GetTasks(request, timeout=60)).tasks)

    train = await tasks(envhost_service_pb2.SPLIT_TRAIN, 0, 4096)
    held_out = await tasks(envhost_service_pb2.SPLIT_EVAL, 0, 4096)
    assert [t.index for t in train] == list(range(2000)) and len(held_out) == 200
    assert len({t.key for t in train} | {t.key for t in held_out}) == 2200
    assert (await tasks(envhost_service_pb2.SPLIT_EVAL, 198, 5)) == held_out[198:]
    listed = await hosted.stub.ListEnvironments(envhost_service_pb2.ListEnvironmentsRequest(), timeout=5)
    assert {"trial-env", "reverse-text"} <= {one.id for one in listed.environments}


async def test_examples_without_splits_are_read_once(hosted: Any) -> None:
    """v1/environment.py 3: those to train on are those to evaluate with."""
    for split in (envhost_service_pb2.SPLIT_TRAIN, envhost_service_pb2.SPLIT_EVAL):
        request = envhost_service_pb2.GetTasksRequest(
            environment=hosted.ref("plain-env"), split=split, count=1, include_data=True
        )
        (task,) = (await hosted.stub.GetTasks(request, timeout=60)).tasks
        assert json.loads(task.data_json)["prompt"] == "Say a word, 1."


async def test_a_version_that_is_named_is_the_one_that_is_there(hosted: Any) -> None:
    """config.py, check_version; also where a worker of the environment runs already."""

    async def described(env_id: str) -> Any:
        request = envhost_service_pb2.DescribeEnvironmentRequest(environment=hosted.ref(env_id))
        return await hosted.stub.DescribeEnvironment(request, timeout=60)

    for version in ("", "@latest", "@0.1", "@0.1.0"):
        assert (await described(f"owner/reverse-text{version}")).environment.version == "0.1.0"
    error = await refusal(described("owner/reverse-text@9.9"))
    assert error.reason == "INVALID_CONFIG" and "is there in version 0.1.0; install 9.9 into" in error.message


async def test_refusals_are_typed_and_say_what_to_do(hosted: Any) -> None:
    stub = hosted.stub
    error = await refusal(stub.RunRollouts(hosted.request("nowhere"), timeout=60))
    assert error.reason == "ENVIRONMENT_UNKNOWN" and "reverse-text" in error.metadata["hosted"]
    error = await refusal(stub.RunRollouts(hosted.request("reverse-text", task_index=9999), timeout=60))
    assert (
        error.reason == "RESOURCE_UNKNOWN" and "task 9999 in this split; they are 0 to 1999" in error.message
    )
    error = await refusal(stub.RunRollouts(hosted.request("reverse-text", members=[]), timeout=60))
    assert error.reason == "INVALID_REQUEST" and error.metadata["field"] == "members"
    for endless in (MAX_TIMEOUT_SECONDS * 1000 + 1, 2**64 - 1):
        error = await refusal(hosted.run("ok", timeout_ms=int(endless)))
        assert error.reason == "INVALID_REQUEST" and "at most 604800000, a week" in error.message
    error = await refusal(hosted.run("ok", split=7))
    assert error.reason == "INVALID_REQUEST" and error.metadata["field"] == "split"
    request = envhost_service_pb2.GetTasksRequest(environment=hosted.ref("trial-env"), split=7, count=1)
    error = await refusal(hosted.stub.GetTasks(request, timeout=10))
    assert error.reason == "INVALID_REQUEST" and error.metadata["field"] == "split"
    error = await refusal(stub.RunRollouts(hosted.request("reverse-text", members=[1, 1]), timeout=60))
    assert error.reason == "INVALID_REQUEST"
    error = await refusal(stub.RunRollouts(hosted.request("reverse-text", members=range(65)), timeout=60))
    assert error.reason == "INVALID_REQUEST" and hosted.host.in_flight == 0
    assert "members = 65 is refused; ask for at most 64, or raise max_in_flight" in error.message


async def test_bad_arguments_are_one_clear_sentence(hosted: Any) -> None:
    for args, text in [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ("[" * 100_000, "not JSON"),
        ('{"num_trian": 3}', "did you mean 'num_train'?"),
    ]:
        ref = envhost_service_pb2.EnvironmentRef(id="reverse-text", args_json=args)
        request = envhost_service_pb2.DescribeEnvironmentRequest(environment=ref)
        error = await refusal(hosted.stub.DescribeEnvironment(request, timeout=60))
        assert error.reason == "INVALID_CONFIG" and text in error.message and "\n" not in error.message


async def test_tasks_that_never_end_are_read_as_far_as_they_are_bounded(hosted: Any) -> None:
    """Invariant 8: no index makes a worker read for ever."""
    ref = envhost_service_pb2.EnvironmentRef(id="endless-env")
    described = await hosted.stub.DescribeEnvironment(
        envhost_service_pb2.DescribeEnvironmentRequest(environment=ref), timeout=60
    )
    assert described.environment.infinite
    request = envhost_service_pb2.GetTasksRequest(environment=ref, start=3, count=2)
    assert [t.index for t in (await hosted.stub.GetTasks(request, timeout=60)).tasks] == [3, 4]
    request.start = 2**64 - 4
    assert not (await hosted.stub.GetTasks(request, timeout=10)).tasks
    error = await refusal(
        hosted.stub.RunRollouts(hosted.request("endless-env", task_index=2**63), timeout=10)
    )
    assert error.reason == "RESOURCE_UNKNOWN" and "they are 0 to 499999" in error.message


async def test_a_taskset_that_breaks_while_it_is_read_answers_at_once(hosted: Any) -> None:
    """Invariant 7: the call ends with the environment's own error, not with the time for loading."""
    ref = envhost_service_pb2.EnvironmentRef(id="endless-env", args_json='{"breaks": true}')
    request = envhost_service_pb2.GetTasksRequest(environment=ref, count=10)
    error = await refusal(hosted.stub.GetTasks(request, timeout=60))
    assert error.reason == "ENVIRONMENT_UNAVAILABLE" and "row 7 is damaged" in error.message


async def test_a_taskset_that_broke_once_is_no_shorter(hosted: Any, tmp_path: Path) -> None:
    """v1/environment.py 4: what was read stays, and what is behind it is there once it can be read."""
    args = json.dumps({"broken_file": str(tmp_path / "broken")})
    ref = envhost_service_pb2.EnvironmentRef(id="endless-env", args_json=args)
    request = envhost_service_pb2.GetTasksRequest(environment=ref, count=10, include_data=True)
    for _ in range(2):  # the second at once
        error = await refusal(hosted.stub.GetTasks(request, timeout=60))
        assert error.reason == "ENVIRONMENT_UNAVAILABLE" and "the data's server is away" in error.message
    run = envhost_service_pb2.RunRolloutsRequest(
        request_id="one", environment=ref, members=[0], task_index=9, timeout_ms=30_000
    )
    rollouts: list[Any] = []
    async with asyncio.timeout(60):
        while not rollouts or rollouts[-1].HasField("failure"):
            stream = hosted.stub.RunRollouts(run, timeout=60)
            rollouts += [frame.rollout async for frame in stream if frame.HasField("rollout")]
            run.request_id += "1"
    assert {kind(rollout) for rollout in rollouts[:-1]} <= {"ENVIRONMENT"}
    tasks = (await hosted.stub.GetTasks(request, timeout=60)).tasks
    assert [json.loads(task.data_json)["prompt"] for task in tasks] == [f"say {n}" for n in range(10)]
    assert [json.loads(task.data_json)["idx"] for task in tasks] == list(range(10))


async def test_ending_the_call_cancels_its_rollouts(hosted: Any) -> None:
    hosted.policy.delay_s = 200.0
    request = hosted.request("trial-env", members=range(4), timeout_ms=200_000)
    call = hosted.stub.RunRollouts(request, timeout=200)
    await asyncio.wait_for(until(lambda: hosted.policy.running == 4), STARTED_S)
    call.cancel()
    await asyncio.wait_for(until(lambda: hosted.policy.running == 0 and hosted.host.in_flight == 0), 60)


async def test_cancel_ends_members_as_cancelled(hosted: Any) -> None:
    hosted.policy.delay_s = 200.0
    run = asyncio.create_task(hosted.run("ok", members=range(3), request_id="doomed", max_retries=2))
    await asyncio.wait_for(until(lambda: hosted.policy.running == 3), STARTED_S)
    again = await refusal(hosted.run("ok", request_id="doomed"))
    assert again.metadata["field"] == "request_id" and "end that one by Cancel" in again.message
    cancel = envhost_service_pb2.CancelRequest(run_id="run", request_ids=["doomed"])
    error = await refusal(hosted.run("ok", members=range(62)))
    assert error.reason == "OVERLOADED" and "3 rollouts of max_in_flight = 64 run" in error.message
    assert (await hosted.stub.Cancel(cancel, timeout=20)).cancelled == 3
    rollouts = await asyncio.wait_for(run, 60)
    assert [kind(r) for r in rollouts] == ["CANCELLED"] * 3
    await asyncio.wait_for(until(lambda: hosted.policy.running == 0), 60)
    assert (await hosted.stub.Cancel(cancel, timeout=20)).cancelled == 0


async def test_a_host_that_is_told_to_end_ends_what_is_under_way_and_takes_no_more(
    envs_python: str, tmp_path: Path
) -> None:
    """host.py 5; longer than calls under way have by themselves (`drain_seconds`)."""
    policy, port_file = ScriptedInference(), tmp_path / "port"
    inference = await serve_scripted(policy)
    command = ["-m", "quartet_envhost", "--python", envs_python, "--server.port-file", str(port_file)]
    command += ["--inference-addresses", f'["{inference.address}"]', "--server.drain-seconds", "0.1"]
    host = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.DEVNULL)
    try:
        await asyncio.wait_for(until(port_file.exists), STARTED_S)
        async with connect(port_file.read_text().strip()) as channel:
            stub: Any = envhost_service_pb2_grpc.EnvHostServiceStub(channel)  # type: ignore[no-untyped-call]

            def run(request_id: str) -> Any:
                ref = envhost_service_pb2.EnvironmentRef(id="reverse-text")
                request = envhost_service_pb2.RunRolloutsRequest(
                    run_id="run", environment=ref, request_id=request_id, members=[0], timeout_ms=30_000
                )
                return stub.RunRollouts(request, timeout=60)

            going_on = policy.held[0] = asyncio.Event()
            under_way = run("under way")
            await asyncio.wait_for(until(lambda: policy.running == 1), STARTED_S)
            host.send_signal(signal.SIGTERM)
            health: Any = health_pb2_grpc.HealthStub(channel)
            async for told in health.Watch(health_pb2.HealthCheckRequest()):
                if told.status == NOT_SERVING:
                    break
            error = await refusal(run("late"))
            assert error.reason == "NOT_READY" and "draining" in error.message
            await asyncio.sleep(0.5)
            going_on.set()
            (rollout,) = [frame.rollout async for frame in under_way if frame.HasField("rollout")]
            assert rollout.samples and kind(rollout) == "UNSPECIFIED"
        assert await asyncio.wait_for(host.wait(), 60) == 0
    finally:
        if host.returncode is None:
            host.kill()
        await inference.stop(0)
