"""Rollouts through a real host, real worker processes and a scripted policy, all over gRPC.

Invariants by their module: pool.py 1-3, host.py 1-2, worker.py 2-3, v1/policy.py 1-4, v1/outcome.py 1.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError, from_rpc
from quartet.v1 import common_pb2, envhost_service_pb2, rollout_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")


def kind(rollout: Any) -> str:
    return rollout_pb2.FailureKind.Name(rollout.failure.kind).removeprefix("FAILURE_KIND_")


async def refusal(call: Any) -> QuartetError:
    with pytest.raises(grpc.RpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return from_rpc(caught.value)


async def test_a_group_of_reverse_text_is_scored(hosted: Any) -> None:
    request = hosted.request("reverse-text", members=range(4), messages_of_members=1, task_index=7)
    stream = hosted.stub.RunRollouts(request, timeout=60)
    rollouts = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    assert sorted(r.member for r in rollouts) == [0, 1, 2, 3]
    for rollout in rollouts:
        assert not rollout.HasField("failure"), rollout.failure
        assert rollout.reward == 1.0
        assert dict(rollout.rewards) == {"lcs_reward": 1.0}
        assert dict(rollout.metrics) == {"exact_match": 1.0}
        assert rollout.num_turns == 1 and rollout.prefix_breaks == 0 and not rollout.truncated
    (first,) = [r for r in rollouts if r.member == 0]
    assert [m.role for m in first.messages] == ["system", "user", "assistant"]
    assert first.messages[0].content.startswith("Reverse the text character-by-character.")
    assert not any(r.messages for r in rollouts if r.member)


async def test_sample_is_exactly_what_was_sampled(hosted: Any) -> None:
    """Invariant 6."""
    from scripted_inference import CLOSE, OPENING, encode, render

    (rollout,) = await hosted.run("ok")
    (sample,) = rollout.samples
    prompt = [*render([common_pb2.Message(role="user", content="hello ok")]), *OPENING]
    completion = [*encode("<reversed_text>ko olleh</reversed_text>"), CLOSE]
    assert list(sample.token_ids) == prompt + completion
    at = len(prompt)
    assert [(s.start, s.length, s.policy_version) for s in sample.spans] == [
        (at, 32, 3),
        (at + 32, len(completion) - 32, 4),
    ]
    want = rollout_pb2.Sample(logprobs=[-0.1 * (1 + token % 7) for token in completion]).logprobs
    assert list(sample.logprobs) == list(want)
    assert rollout.rewards["length"] == len(completion) - 1 and rollout.reward == 0.5 * (len(completion) - 1)
    assert (rollout.usage.prompt_tokens, rollout.usage.completion_tokens) == (at, len(completion))


async def test_turns_extend_the_sampled_tokens(hosted: Any) -> None:
    """Invariant 6: turns merge by exact prefix."""
    (rollout,) = await hosted.run("two_turns", messages_of_members=1)
    first, second, third = hosted.policy.requests
    assert first.HasField("messages") and second.HasField("tokens") and third.HasField("tokens")
    assert [m.content for m in second.tokens.tail_messages] == ["again"]
    (sample,) = rollout.samples
    assert rollout.num_turns == 3 and rollout.prefix_breaks == 0
    assert list(sample.token_ids)[: len(third.tokens.token_ids)] == list(third.tokens.token_ids)
    assert list(third.tokens.token_ids)[: len(second.tokens.token_ids)] == list(second.tokens.token_ids)
    covered = sum(span.length for span in sample.spans)
    assert covered == len(sample.logprobs) == rollout.usage.completion_tokens < len(sample.token_ids)
    assert [m.role for m in rollout.messages] == ["user", "assistant"] * 3
    assert rollout.metrics["turns"] == 3.0


async def test_a_broken_prefix_starts_a_new_sample_and_is_counted(hosted: Any) -> None:
    """Invariant 6: a break is counted."""
    hosted.policy.forgets = True
    (rollout,) = await hosted.run("two_turns")
    assert not rollout.HasField("failure"), rollout.failure
    assert rollout.prefix_breaks == 2 and len(rollout.samples) == 3
    covered = sum(span.length for sample in rollout.samples for span in sample.spans)
    assert covered == rollout.usage.completion_tokens


async def test_a_template_that_cannot_be_extended_gets_the_whole_conversation(
    hosted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 6: what is rendered whole is a break only where it does not extend the tokens."""
    frames = hosted.policy._frames

    def unextendable(request: Any) -> list[Any]:
        if request.HasField("tokens"):
            field = "tokens.tail_messages"
            raise QuartetError("INVALID_REQUEST", f"{field}: send messages", field=field)
        return list(frames(request))

    monkeypatch.setattr(hosted.policy, "_frames", unextendable)
    (rollout,) = await hosted.run("two_turns")
    assert not rollout.HasField("failure"), rollout.failure
    assert rollout.num_turns == 3 and rollout.prefix_breaks == 0 and len(rollout.samples) == 1
    whole = [r.messages.messages for r in hosted.policy.requests if r.HasField("messages")]
    assert [len(messages) for messages in whole] == [1, 3, 5]


async def test_seeds_differ_by_member_and_turn_and_repeat(hosted: Any) -> None:
    seeded = common_pb2.SamplingParams(seed=11, temperature=0.7, top_k=5, stop=["x"], max_tokens=100)
    await hosted.run("two_turns", members=[0, 1], sampling=seeded)
    seeds = sorted(r.sampling.seed for r in hosted.policy.requests)
    assert len(set(seeds)) == 6
    sent = hosted.policy.requests[0].sampling
    assert (sent.top_k, list(sent.stop), sent.max_tokens) == (5, ["x"], 100)
    assert sent.temperature == pytest.approx(0.7)
    hosted.policy.requests.clear()
    await hosted.run("two_turns", members=[1, 0], sampling=seeded)
    assert sorted(r.sampling.seed for r in hosted.policy.requests) == seeds
    hosted.policy.requests.clear()
    await hosted.run("ok")
    assert not hosted.policy.requests[0].sampling.HasField("seed")


async def test_versions_and_run_are_passed_on(hosted: Any) -> None:
    await hosted.run("ok", min_policy_version=2, request_id="group-1")
    (sent,) = hosted.policy.requests
    assert (sent.run_id, sent.min_policy_version, sent.session_id) == ("run", 2, "group-1")
    assert not sent.HasField("exact_policy_version")


async def test_a_token_limit_truncates_and_earns_nothing(hosted: Any) -> None:
    request = hosted.request("reverse-text", sampling=common_pb2.SamplingParams(max_tokens=20))
    rollouts = [f.rollout async for f in hosted.stub.RunRollouts(request, timeout=60)]
    assert rollouts[0].truncated and rollouts[0].reward == 0.0 and not rollouts[0].HasField("failure")


@pytest.mark.parametrize(
    ("mode", "want", "text"),
    [
        ("setup_raises", "ENVIRONMENT", "no such row"),
        ("run_raises", "ENVIRONMENT", "the environment's bug"),
        ("reward_raises", "SCORER", "a scorer's bug"),
        ("reward_nan", "SCORER", "length"),
        ("metric_raises", "SCORER", "a metric's bug"),
        ("quits", "ENVIRONMENT", "thinks that it is a program"),
        ("gives_up", "ENVIRONMENT", "EnvError"),
        ("cancels_itself", "ENVIRONMENT", "CancelledError"),
        ("raises_half_a_pair", "ENVIRONMENT", "no such emoji: ?"),
        ("says_half_a_pair", "ENVIRONMENT", "surrogates"),
    ],
)
async def test_what_the_environment_does_wrong_is_typed(hosted: Any, mode: str, want: str, text: str) -> None:
    """Invariant 5."""
    (rollout,) = await hosted.run(mode, max_retries=2)
    assert kind(rollout) == want and text in rollout.failure.message
    assert not rollout.failure.retryable and len(hosted.policy.requests) <= 1


async def test_a_broken_rollout_does_not_end_its_group(hosted: Any) -> None:
    """Invariant 5: each member's scorer fails in its own way; the others are rewarded, with zero too."""
    said = ["fine", "zero", "raise", "nan", "inf", "huge", "text", "none", "fine"]
    replies = iter(said)
    hosted.policy.answer = lambda request, last: next(replies)
    rollouts = await hosted.run("reply_decides", members=range(len(said)), messages_of_members=len(said))
    assert sorted(r.member for r in rollouts) == list(range(len(said)))
    scored = sorted(r.reward for r in rollouts if not r.HasField("failure"))
    assert scored == [0.0, 1.0, 1.0]
    failed = [r for r in rollouts if r.HasField("failure")]
    assert {kind(r) for r in failed} == {"SCORER"}, [r.failure for r in failed]
    assert {r.messages[-1].content for r in failed} == {"raise", "nan", "inf", "huge", "text", "none"}
    assert all(r.samples for r in failed), "what was sampled is there to be looked at"


async def test_prints_do_not_disturb_the_line(hosted: Any) -> None:
    (rollout,) = await hosted.run("prints")
    assert not rollout.HasField("failure") and rollout.reward > 0


async def test_deadline_covers_scoring(hosted: Any) -> None:
    """Invariants 5 and 7."""
    started = time.monotonic()
    (rollout,) = await hosted.run("scores_slowly", timeout_ms=500)
    assert kind(rollout) == "TIMEOUT" and time.monotonic() - started < 5


async def test_a_refused_model_call_is_tried_again(hosted: Any) -> None:
    hosted.policy.errors = [QuartetError("NOT_READY", "restarting"), QuartetError("OVERLOADED", "full")]
    (rollout,) = await hosted.run("ok")
    assert not rollout.HasField("failure") and len(hosted.policy.requests) == 3


async def test_a_torn_answer_goes_on_from_the_tokens_it_has(hosted: Any) -> None:
    """Invariant 6: no token lost, none twice, versions and log-probabilities glued."""
    (whole,) = await hosted.run("ok")
    hosted.policy.requests.clear()
    hosted.policy.torn = 1
    (rollout,) = await hosted.run("ok")
    assert rollout.samples == whole.samples and rollout.reward == whole.reward
    assert rollout.usage.completion_tokens == whole.usage.completion_tokens
    asked, again = hosted.policy.requests
    assert asked.HasField("messages") and again.resumed_tokens == 32
    assert again.tokens.token_ids == whole.samples[0].token_ids[: len(again.tokens.token_ids)]


async def test_a_model_failure_is_typed_and_retried_within_its_budget(hosted: Any) -> None:
    hosted.policy.errors = [QuartetError("INTERNAL", "engine fault")] * 2
    (rollout,) = await hosted.run("ok", max_retries=2)
    assert not rollout.HasField("failure") and len(hosted.policy.requests) == 3
    hosted.policy.errors = [QuartetError("INTERNAL", "engine fault")] * 2
    (rollout,) = await hosted.run("ok", max_retries=1)
    assert kind(rollout) == "MODEL" and rollout.failure.retryable
    hosted.policy.errors = [QuartetError("PROMPT_TOO_LONG", "9 tokens, limit 4")]
    (rollout,) = await hosted.run("ok", max_retries=1)
    assert kind(rollout) == "MODEL" and not rollout.failure.retryable


async def test_ending_the_call_cancels_its_rollouts(hosted: Any) -> None:
    hosted.policy.delay_s = 20.0
    call = hosted.stub.RunRollouts(hosted.request("trial-env", members=range(4)), timeout=60)
    await asyncio.wait_for(_until(lambda: hosted.policy.running == 4), 10)
    call.cancel()
    await asyncio.wait_for(_until(lambda: hosted.policy.running == 0 and hosted.host.in_flight == 0), 10)


async def test_cancel_ends_members_as_cancelled(hosted: Any) -> None:
    hosted.policy.delay_s = 20.0
    run = asyncio.create_task(hosted.run("ok", members=range(3), request_id="doomed", max_retries=2))
    await asyncio.wait_for(_until(lambda: hosted.policy.running == 3), 10)
    cancel = envhost_service_pb2.CancelRequest(run_id="run", request_ids=["doomed"])
    assert (await hosted.stub.Cancel(cancel, timeout=5)).cancelled == 3
    rollouts = await asyncio.wait_for(run, 10)
    assert [kind(r) for r in rollouts] == ["CANCELLED"] * 3
    await asyncio.wait_for(_until(lambda: hosted.policy.running == 0), 10)
    assert (await hosted.stub.Cancel(cancel, timeout=5)).cancelled == 0


async def test_killed_worker_fails_its_members_and_they_are_retried(hosted: Any) -> None:
    """Invariants 5 and 9."""
    hosted.policy.delay_s = 1.0
    without = asyncio.create_task(hosted.run("ok", members=range(3)))
    retried = asyncio.create_task(hosted.run("ok", members=range(3), max_retries=1, timeout_ms=20_000))
    await asyncio.wait_for(_until(lambda: hosted.policy.running == 6), 10)
    killed_at = time.monotonic()
    os.kill(hosted.workers[0].pid, signal.SIGKILL)
    rollouts = await without
    assert time.monotonic() - killed_at < 1.0, "members end at once"
    assert sorted(r.member for r in rollouts) == [0, 1, 2]
    assert all(kind(r) == "HOST" and r.failure.retryable and "SIGKILL" in r.failure.message for r in rollouts)
    rollouts = await retried
    assert sorted(r.member for r in rollouts) == [0, 1, 2]
    assert not any(r.HasField("failure") for r in rollouts)


async def test_wedged_worker_is_stopped_and_only_it_fails(hosted: Any) -> None:
    """Invariant 7."""
    # The times below are a rollout's; starting a worker takes as long as the machine is busy.
    await hosted.run("ok", timeout_ms=60_000)
    wedged = asyncio.create_task(hosted.run("wedges", timeout_ms=1000))
    await asyncio.sleep(0.3)
    beside = asyncio.create_task(hosted.run("ok", max_retries=1))
    (rollout,) = await asyncio.wait_for(wedged, 8)
    assert kind(rollout) == "TIMEOUT" and "no longer answered" in rollout.failure.message
    (rollout,) = await asyncio.wait_for(beside, 60)
    assert not rollout.HasField("failure"), "retried on the respawned worker"


async def test_descriptions_and_tasks(hosted: Any) -> None:
    ref = hosted.ref("owner/reverse-text")
    described = await hosted.stub.DescribeEnvironment(
        envhost_service_pb2.DescribeEnvironmentRequest(environment=ref), timeout=60
    )
    info = described.environment
    assert (info.api, info.verifiers_version[:4], info.version) == ("v1", "0.4.", "0.1.0")
    assert (info.train_size, info.eval_size, info.workers) == (2000, 200, 1)
    assert (list(info.rewards), list(info.metrics)) == (["lcs_reward"], ["exact_match"])

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


async def test_refusals_are_typed_and_say_what_to_do(hosted: Any) -> None:
    stub = hosted.stub
    error = await refusal(stub.RunRollouts(hosted.request("nowhere"), timeout=60))
    assert error.reason == "ENVIRONMENT_UNKNOWN" and "reverse-text" in error.metadata["hosted"]
    error = await refusal(stub.RunRollouts(hosted.request("reverse-text", task_index=9999), timeout=60))
    assert error.reason == "RESOURCE_UNKNOWN" and "task 9999" in error.message
    error = await refusal(stub.RunRollouts(hosted.request("reverse-text", members=[]), timeout=60))
    assert error.reason == "INVALID_REQUEST" and error.metadata["field"] == "members"
    error = await refusal(hosted.run("ok", split=7))
    assert error.reason == "INVALID_REQUEST" and error.metadata["field"] == "split"
    request = envhost_service_pb2.GetTasksRequest(environment=hosted.ref("trial-env"), split=7, count=1)
    error = await refusal(hosted.stub.GetTasks(request, timeout=10))
    assert error.reason == "INVALID_REQUEST" and error.metadata["field"] == "split"
    error = await refusal(stub.RunRollouts(hosted.request("reverse-text", members=[1, 1]), timeout=60))
    assert error.reason == "INVALID_REQUEST"
    error = await refusal(stub.RunRollouts(hosted.request("reverse-text", members=range(65)), timeout=60))
    assert error.reason == "OVERLOADED" and hosted.host.in_flight == 0


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
    assert error.reason == "RESOURCE_UNKNOWN"


async def test_a_taskset_that_breaks_while_it_is_read_answers_at_once(hosted: Any) -> None:
    """Invariant 7: the call ends with the environment's own error, not with the time for loading."""
    ref = envhost_service_pb2.EnvironmentRef(id="endless-env", args_json='{"breaks": true}')
    request = envhost_service_pb2.GetTasksRequest(environment=ref, count=10)
    error = await refusal(hosted.stub.GetTasks(request, timeout=60))
    assert error.reason == "ENVIRONMENT_UNAVAILABLE" and "row 7 is damaged" in error.message


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


@pytest.mark.slow
async def test_tool_answers_are_carried_and_not_trained_on(hosted: Any) -> None:
    def script(request: Any, last: str) -> str:
        match last:
            case "what is 40 plus 2?":
                assert [tool.name for tool in request.tools] == ["calc_add", "calc_explode"]
                return 'call calc_add {"a": 40, "b": 2}'
            case "42":
                return "call calc_add not json"
        return f"it is 42 ({last[:12]})"

    hosted.policy.answer = script
    request = hosted.request("tool-env", task_index=0, timeout_ms=60_000, messages_of_members=1)
    stream = hosted.stub.RunRollouts(request, timeout=90)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    assert not rollout.HasField("failure"), rollout.failure
    assert rollout.reward == 1.0 and rollout.metrics["calls"] == 1.0 and rollout.num_turns == 3
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [m.role for m in rollout.messages] == roles
    assert rollout.messages[1].tool_calls[0].arguments_json == '{"a": 40, "b": 2}'
    assert rollout.messages[2].content == "42" and "not JSON" in rollout.messages[4].content
    (sample,) = rollout.samples
    covered = sum(span.length for span in sample.spans)
    assert covered == rollout.usage.completion_tokens and rollout.prefix_breaks == 0


@pytest.mark.slow
async def test_a_tool_server_that_dies_is_a_failure_of_the_tool(hosted: Any) -> None:
    """Invariant 5."""
    hosted.policy.answer = lambda request, last: "call calc_explode {}"
    request = hosted.request("tool-env", task_index=0, timeout_ms=90_000)
    stream = hosted.stub.RunRollouts(request, timeout=120)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    assert kind(rollout) == "TOOL" and "calc_explode" in rollout.failure.message, rollout.failure
    assert rollout.failure.retryable and len(hosted.policy.requests) == 1


async def test_worker_that_exits_is_respawned_within_the_budget(hosted: Any) -> None:
    (rollout,) = await hosted.run("exits_once", max_retries=1, timeout_ms=20_000)
    assert not rollout.HasField("failure"), rollout.failure
    (rollout,) = await hosted.run("exits")
    assert kind(rollout) == "HOST" and "exited with code 3" in rollout.failure.message


async def _until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes too
        await asyncio.sleep(0.02)
