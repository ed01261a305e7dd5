"""Classic packages through a real host on an interpreter with verifiers 0.3 (`make classic` makes it).

Invariants by their module: classic/environment.py 1-2 and 4, classic/policy.py 1-4, classic/scoring.py 2,
classic/outcome.py 1-3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError, from_rpc
from quartet.interact import interact
from quartet.v1 import common_pb2, envhost_service_pb2
from rollout_outcomes import kind
from scripted_inference import TOO_DEEP, says

pytestmark = pytest.mark.asyncio(loop_scope="session")
ROOT = Path(__file__).resolve().parents[3]


async def test_a_classic_environment_is_described_and_listed(classic: Any) -> None:
    """By a forked worker, too: without what an environment may set variables for before it imports it
    (loading.py).
    """
    ref = envhost_service_pb2.EnvironmentRef(id="classic-env")
    request = envhost_service_pb2.DescribeEnvironmentRequest(environment=ref)
    info = (await classic.stub.DescribeEnvironment(request, timeout=90)).environment
    assert (info.api, info.verifiers_version[:4]) == ("classic", "0.3.")
    assert (info.train_size, info.eval_size, info.infinite) == (len(classic.modes), 1, False)
    assert list(info.rewards) == ["length"] and list(info.metrics) == ["num_turns", "said_hello"]
    assert dict(info.weights) == {"length": 0.5}

    async def tasks(split: int) -> list[Any]:
        request = envhost_service_pb2.GetTasksRequest(
            environment=ref, split=split, count=100, include_data=True
        )
        return list((await classic.stub.GetTasks(request, timeout=60)).tasks)

    train, held_out = (
        await tasks(envhost_service_pb2.SPLIT_TRAIN),
        await tasks(envhost_service_pb2.SPLIT_EVAL),
    )
    assert [json.loads(t.data_json)["answer"] for t in train] == list(classic.modes) and len(held_out) == 1
    assert len({t.key for t in [*train, *held_out]}) == len(classic.modes) + 1
    environments = (
        await classic.stub.ListEnvironments(envhost_service_pb2.ListEnvironmentsRequest(), timeout=5)
    ).environments
    (listed,) = [one for one in environments if one.workers]
    assert listed.id == "classic-env" and listed.api == "classic" and listed.workers == 1
    assert [one.forked for pool in classic.host._pools.values() for one in pool.workers] == [True]


async def test_a_group_is_scored_and_its_tokens_are_the_sampled_ones(classic: Any) -> None:
    """Invariant 6."""
    from scripted_inference import CLOSE, OPENING, encode, render

    classic.policy.weights_id = 7
    rollouts = await classic.run(members=range(4), messages_of_members=1)
    for rollout in rollouts:
        told = {(one.policy_version, one.weights_id) for one in rollout.weights}
        assert told == {(span.policy_version, 7) for span in rollout.samples[0].spans}
    assert sorted(r.member for r in rollouts) == [0, 1, 2, 3]
    prompt = [*render([common_pb2.Message(role="user", content="hello ok")]), *OPENING]
    completion = [*encode("<reversed_text>ko olleh</reversed_text>"), CLOSE]
    for rollout in rollouts:
        assert not rollout.HasField("failure"), rollout.failure
        (sample,) = rollout.samples
        assert list(sample.token_ids) == prompt + completion
        assert sum(s.length for s in sample.spans) == len(sample.logprobs) == len(completion)
        said = len(completion) - 1
        assert dict(rollout.rewards) == {"length": said} and rollout.reward == 0.5 * said
        assert dict(rollout.metrics) == {"num_turns": 1.0, "said_hello": 0.0}
        assert rollout.stop_condition == "enough" and rollout.num_turns == 1
    (first,) = [r for r in rollouts if r.member == 0]
    assert [m.role for m in first.messages] == ["user", "assistant"]
    assert json.loads(first.task_json)["answer"] == "ok"
    assert not any(r.task_json for r in rollouts if r.member)


async def test_turns_extend_the_sampled_tokens(classic: Any) -> None:
    """Invariant 6: turns merge by exact prefix; a break is counted."""
    structure = common_pb2.Structure(regex="[a-z]+")
    sampling = common_pb2.SamplingParams(seed=3, max_tokens=60, top_k=7, stop=["x"], structure=structure)
    sampling.min_tokens = 4  # the service refuses it beside a structure, a host takes both there
    (rollout,) = await classic.run("turns", sampling=sampling)
    first, second, third = classic.policy.requests
    assert first.HasField("messages") and second.HasField("tokens") and third.HasField("tokens")
    assert [m.content for m in third.tokens.tail_messages] == ["again"]
    (sample,) = rollout.samples
    assert rollout.num_turns == 3 and rollout.prefix_breaks == 0 and len(sample.spans) >= 3
    assert list(sample.token_ids)[: len(third.tokens.token_ids)] == list(third.tokens.token_ids)
    covered = sum(span.length for span in sample.spans)
    assert covered == rollout.usage.completion_tokens < len(sample.token_ids)
    assert len(set(classic.policy.seeds)) == 3
    assert (third.sampling.max_tokens, third.sampling.top_k, list(third.sampling.stop)) == (60, 7, ["x"])
    assert third.sampling.structure == structure and third.sampling.min_tokens == 4
    classic.policy.forgets = True
    (rollout,) = await classic.run("turns")
    assert rollout.prefix_breaks == 2 and len(rollout.samples) == 3


async def test_what_its_environment_masks_is_not_learned(classic: Any) -> None:
    """classic/outcome.py 2"""
    classic.policy.answer = says("mask", "two", "three")
    (rollout,) = await classic.run("turns")
    (sample,) = rollout.samples
    assert not rollout.HasField("failure") and rollout.num_turns == 3
    assert sum(span.length for span in sample.spans) == len(sample.logprobs) == len("two.three.")
    assert rollout.usage.completion_tokens == len("mask.two.three."), "each with its end"


async def test_settings_of_the_template_are_asked_for_in_every_turn(classic: Any) -> None:
    """classic/policy.py 3"""
    chosen = '{"enable_thinking": false, "style": "brief"}'
    await classic.run("turns", template_settings=chosen)
    assert [r.template_settings for r in classic.policy.requests] == [chosen] * 3
    own = {"chat_template_kwargs": {"style": "long"}, "top_k": -1}  # that keeps all, as vLLM has it
    args = {"sampling": {"extra_body": own}}
    full = f'{{"a": "{8183 * "x"}"}}'
    for said, want in ((chosen, ['{"enable_thinking": false, "style": "long"}']), (full, [])):
        classic.policy.requests.clear()
        (rollout,) = await classic.run(args=args, template_settings=said)
        assert [r.template_settings for r in classic.policy.requests] == want
        assert not any(r.sampling.top_k for r in classic.policy.requests)
    assert kind(rollout) == "MODEL" and "at most 8192 travel" in rollout.failure.message


@pytest.mark.parametrize(
    ("mode", "want", "text", "retryable"),
    [
        ("reward_raises", "SCORER", "length: ZeroDivisionError: a scorer's bug", False),
        ("reward_nan", "SCORER", "not a finite number: length", False),
        ("reward_text", "SCORER", "length: ValueError", False),
        ("setup_raises", "ENVIRONMENT", "no such row", False),
        ("response_raises", "ENVIRONMENT", "the environment's bug", False),
        ("sandbox_gone", "TOOL", "lost the sandbox", True),
    ],
)
async def test_what_classic_verifiers_swallows_is_typed(
    classic: Any, mode: str, want: str, text: str, retryable: bool
) -> None:
    """Invariant 5: no reward 0 for a reward function that raised."""
    (rollout,) = await classic.run(mode)
    assert kind(rollout) == want and text in rollout.failure.message, rollout.failure
    assert rollout.failure.retryable == retryable


async def test_clocks_are_timeouts(classic: Any) -> None:
    """Invariants 5 and 7: the request's over scoring too, and the environment's own."""
    (rollout,) = await classic.run("scores_slowly", timeout_ms=1500)
    assert kind(rollout) == "TIMEOUT", rollout.failure
    (rollout,) = await classic.run("own_clock", {"seconds": 0.5})
    assert kind(rollout) == "TIMEOUT" and "environment's own" in rollout.failure.message


async def test_a_clock_that_is_put_back_while_a_rollout_is_scored_harms_nothing(classic: Any) -> None:
    """A machine that was asleep, a clock that is set for the first time."""
    (rollout,) = await classic.run("clock_put_back")
    assert not rollout.HasField("failure") and rollout.timing.scoring_ms == 0, rollout.failure
    assert rollout.reward > 0


async def test_plain_dicts_in_a_state_are_messages_as_in_verifiers(classic: Any) -> None:
    (rollout,) = await classic.run("dicts", messages_of_members=1)
    assert not rollout.HasField("failure") and rollout.reward > 0, rollout.failure
    assert rollout.messages[0].content == "as a dict\nof parts"
    assert [m.role for m in rollout.messages] == ["user", "assistant"]


async def test_a_conversation_that_no_message_can_tell_fails_no_rollout(classic: Any) -> None:
    """classic/outcome.py 4"""
    (rollout,) = await classic.run("untold", messages_of_members=1)
    assert not rollout.HasField("failure") and rollout.reward > 0, rollout.failure
    assert not rollout.messages and rollout.samples


async def test_a_package_has_processes_of_its_own_as_in_verifiers(classic: Any) -> None:
    """classic/pools.py 1-3: also one that says itself how they start."""
    (rollout,) = await classic.run("processes")
    assert not rollout.HasField("failure") and rollout.rewards["length"] == 512, rollout.failure


async def test_model_failures_are_typed_and_a_full_context_truncates(classic: Any) -> None:
    classic.policy.errors = [QuartetError("INTERNAL", "engine fault")] * 2
    (rollout,) = await classic.run(max_retries=1)
    assert kind(rollout) == "MODEL" and rollout.failure.retryable
    classic.policy.errors = [QuartetError("PROMPT_TOO_LONG", "9 tokens, limit 4")]
    (rollout,) = await classic.run(max_retries=1)
    assert kind(rollout) == "MODEL" and not rollout.failure.retryable

    def full(request: Any, last: str) -> str:
        if len(classic.policy.requests) == 2:
            raise QuartetError("PROMPT_TOO_LONG", "9 tokens, limit 4")
        return "some words"

    classic.policy.requests.clear()
    classic.policy.answer = full
    (rollout,) = await classic.run("turns")
    assert not rollout.HasField("failure") and rollout.truncated and rollout.num_turns == 1
    assert rollout.stop_condition == "prompt_too_long" and rollout.reward == 5.0


async def test_tool_answers_are_carried_and_not_trained_on(classic: Any) -> None:
    def script(request: Any, last: str) -> str:
        match last:
            case "what is 40 plus 2?":
                assert [tool.name for tool in request.tools] == ["add", "divide", "half"]
                return 'call add {"a": 40, "b": 2}'
            case "42":
                return f'call add {{"a": {"9" * 5000}, "b": 2}}'
            case str() if "digits" in last:  # what the model wrote is no failure of the environment
                return f"call add {'[' * TOO_DEEP}{']' * TOO_DEEP}"
            case str() if "recursion" in last:
                return "it is 42"
        raise AssertionError(last)

    classic.policy.answer = script
    (rollout,) = await classic.run(args={"kind": "tools"}, messages_of_members=1)
    assert not rollout.HasField("failure"), rollout.failure
    assert rollout.reward == 1.0 and rollout.metrics["total_tool_calls"] == 3.0
    assert [m.role for m in rollout.messages] == ["user", *["assistant", "tool"] * 3, "assistant"]
    (sample,) = rollout.samples
    covered = sum(span.length for span in sample.spans)
    assert covered == rollout.usage.completion_tokens and rollout.prefix_breaks == 0


async def test_the_client_is_the_policy_of_a_classic_environment(classic: Any) -> None:
    async def policy(question: Any) -> Any:
        return envhost_service_pb2.ModelAnswer(
            prompt_token_ids=[*question.prefix_token_ids, 5, 6],
            token_ids=[7, 8],
            logprobs=[-1.0, -2.0],
            message=common_pb2.Message(content="hello"),
            policy_version=4,
        )

    (rollout,) = [r async for r in interact(classic.stub, classic.request("turns"), policy, timeout_s=60)]
    assert not rollout.HasField("failure"), rollout.failure
    assert not classic.policy.requests and rollout.metrics["said_hello"] == 1.0
    (sample,) = rollout.samples
    assert list(sample.token_ids) == [5, 6, 7, 8] * 3 and list(sample.logprobs) == [-1.0, -2.0] * 3


@pytest.mark.parametrize(
    ("env_id", "args", "reason", "text"),
    [
        ("unloadable-env", {"knid": "trial"}, "INVALID_CONFIG", "did you mean 'kind'?"),
        (
            "unloadable-env",
            {"kind": "broken"},
            "ENVIRONMENT_UNAVAILABLE",
            "FileNotFoundError: no data here",
        ),
        (
            "unloadable-env",
            {"kind": "forgets to return"},
            "ENVIRONMENT_UNAVAILABLE",
            "load_environment returned 'NoneType', no vf.Environment",
        ),
        (
            "unloadable-env",
            {"kind": "is async"},
            "ENVIRONMENT_UNAVAILABLE",
            "load_environment returned 'coroutine', no vf.En",
        ),
        (
            "numpy",
            {},
            "INVALID_CONFIG",
            "package 'numpy' is installed, and is no environment of classic Verifiers: it has no "
            "load_environment; name another, or",
        ),
    ],
)
async def test_what_cannot_be_loaded_says_why(
    classic: Any, env_id: str, args: dict[str, Any], reason: str, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await classic.run(args=args, env_id=env_id)
    error = from_rpc(caught.value)
    assert error.reason == reason and text in error.message, error


async def test_half_a_surrogate_pair_that_a_tool_says_reaches_the_model_as_what_can(classic: Any) -> None:
    """A model could make itself unscored with what a tool says for it."""
    classic.policy.answer = lambda request, last: "42" if "half" in last else "call half {}"
    (rollout,) = await classic.run(args={"kind": "tools"}, task_index=0, messages_of_members=1)
    assert not rollout.HasField("failure") and rollout.reward == 1.0, rollout.failure
    assert [one.content for one in rollout.messages if one.role == "tool"] == ["half ?"]


async def test_functions_without_a_name_and_named_alike_are_told_apart(classic: Any) -> None:
    """classic/scoring.py 1."""
    (rollout,) = await classic.run(args={"kind": "names"})
    assert not rollout.HasField("failure"), rollout.failure
    assert dict(rollout.rewards) == {"scaled": 2.0, "Scaled": 3.0} and rollout.reward == 5.0
    assert rollout.metrics["scaled_2"] == 1.0
    ref = classic.request(args={"kind": "names"}).environment
    request = envhost_service_pb2.DescribeEnvironmentRequest(environment=ref)
    info = (await classic.stub.DescribeEnvironment(request, timeout=90)).environment
    assert list(info.rewards) == ["Scaled", "scaled"] and "scaled_2" in info.metrics


@pytest.mark.parametrize(
    ("mode", "raised"), [("reward_cancelled", "CancelledError"), ("reward_closes", "GeneratorExit")]
)
async def test_what_looks_like_an_end_from_outside_is_the_scorers(
    classic: Any, mode: str, raised: str
) -> None:
    """own_tasks.from_outside: nobody has cancelled the rollout."""
    (rollout,) = await classic.run(mode)
    assert kind(rollout) == "SCORER" and raised in rollout.failure.message, rollout.failure
