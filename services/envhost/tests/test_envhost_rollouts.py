"""What rollouts come back as: a real host, real worker processes, a scripted policy, all over gRPC.

Invariants by their module: v1/policy.py 1-4, v1/outcome.py 1-3, samples.py 1-3.
"""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError, from_rpc
from quartet.v1 import common_pb2, envhost_service_pb2, rollout_pb2
from quartet_envhost.sampler import session_of
from rollout_outcomes import kind
from scripted_inference import TOO_DEEP, decode, says

pytestmark = pytest.mark.asyncio(loop_scope="session")


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
    prompt = first.messages[1].content
    assert json.loads(first.task_json) == {"answer": prompt[::-1]}
    assert not any(r.messages or r.task_json for r in rollouts if r.member)


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
    assert not rollout.weights, "an inference of an earlier release does not tell them"


async def test_which_weights_answered_is_told_once_for_each_version(hosted: Any) -> None:
    hosted.policy.weights_id = 2**64 - 1
    (rollout,) = await hosted.run("two_turns")
    told = [(one.policy_version, one.weights_id) for one in rollout.weights]
    assert rollout.num_turns == 3 and told == [(3, 2**64 - 1), (4, 2**64 - 1)]


@pytest.mark.parametrize(("last", "learned"), [("summary, left", 2), ("summary, taken", 3), ("fine", 3)])
async def test_a_summary_that_its_harness_did_not_go_on_from_is_no_sample(
    hosted: Any, last: str, learned: int
) -> None:
    """v1/outcome.py 2."""
    hosted.policy.answer = says("one", "two", last)
    (rollout,) = await hosted.run("two_turns")
    (sample,) = rollout.samples
    spoken = ["one", "two", last][:learned]
    assert len(sample.logprobs) == sum(len(text) + 1 for text in spoken), "each with its end"
    assert sample.spans[-1].start + sample.spans[-1].length == len(sample.token_ids)
    assert not rollout.HasField("failure") and rollout.num_turns == 3


async def test_a_reward_without_weight_is_a_metric(hosted: Any) -> None:
    """v1/outcome.py 3: as everywhere, so gdpo does not learn from it."""
    args = json.dumps({"task": {"rewards": {"length": {"weight": 0}}}})
    trial = envhost_service_pb2.EnvironmentRef(id="trial-env", args_json=args)
    request = envhost_service_pb2.DescribeEnvironmentRequest(environment=trial)
    info = (await hosted.stub.DescribeEnvironment(request, timeout=90)).environment
    assert not info.rewards and list(info.metrics) == ["length", "turns"]
    asked = hosted.request("trial-env")
    asked.environment.CopyFrom(trial)
    stream = hosted.stub.RunRollouts(asked, timeout=60)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    assert rollout.reward == 0 and not rollout.rewards and not rollout.HasField("failure")
    assert rollout.metrics["length"] > 0


async def test_what_its_environment_masks_is_not_learned(hosted: Any) -> None:
    """v1/outcome.py 2: all of the first turn, and the end of the last."""
    hosted.policy.answer = says("one", "two", "mask")
    (rollout,) = await hosted.run("two_turns")
    (sample,) = rollout.samples
    assert not rollout.HasField("failure") and rollout.num_turns == 3
    learned = [sample.token_ids[span.start + i] for span in sample.spans for i in range(span.length)]
    assert decode(learned) == "twomask" and len(learned) == len(sample.logprobs) == len("two.mask")
    assert rollout.usage.completion_tokens == len("one.two.mask."), "each with its end"


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

    def unextendable(request: Any, index: int) -> list[Any]:
        if request.HasField("tokens"):
            field = "tokens.tail_messages"
            raise QuartetError("INVALID_REQUEST", f"{field}: send messages", field=field)
        return list(frames(request, index))

    monkeypatch.setattr(hosted.policy, "_frames", unextendable)
    (rollout,) = await hosted.run("two_turns")
    assert not rollout.HasField("failure"), rollout.failure
    assert rollout.num_turns == 3 and rollout.prefix_breaks == 0 and len(rollout.samples) == 1
    whole = [r.messages.messages for r in hosted.policy.requests if r.HasField("messages")]
    assert [len(messages) for messages in whole] == [1, 3, 5]


async def test_seeds_differ_by_member_and_turn_and_repeat(hosted: Any) -> None:
    seeded = common_pb2.SamplingParams(seed=11, temperature=0.7, top_k=5, stop=["x"], max_tokens=100)
    seeded.min_tokens = 8
    await hosted.run("two_turns", members=[0, 1], sampling=seeded)
    seeds = sorted(hosted.policy.seeds)
    assert len(set(seeds)) == 6
    sent = hosted.policy.requests[0].sampling
    assert (sent.top_k, list(sent.stop), sent.max_tokens, sent.min_tokens) == (5, ["x"], 100, 8)
    assert sent.temperature == pytest.approx(0.7)
    hosted.policy.requests.clear()
    await hosted.run("two_turns", members=[1, 0], sampling=seeded)
    assert sorted(hosted.policy.seeds) == seeds
    hosted.policy.requests.clear()
    await hosted.run("ok")
    assert hosted.policy.seeds == []


async def test_a_structure_is_asked_for_in_every_turn(hosted: Any) -> None:
    """It is enforced or refused, never lost on the way."""
    structure = common_pb2.Structure(regex="[a-z]+")
    await hosted.run("two_turns", sampling=common_pb2.SamplingParams(structure=structure))
    assert [r.sampling.structure for r in hosted.policy.requests] == [structure] * 3


async def test_settings_of_the_template_are_asked_for_in_every_turn(hosted: Any) -> None:
    """v1/policy.py 4: an agent's own win, key by key, but for its temperature (5). What cannot be chosen runs
    nowhere."""
    chosen = '{"enable_thinking": false, "style": "brief"}'
    await hosted.run("two_turns", template_settings=chosen)
    assert [r.template_settings for r in hosted.policy.requests] == [chosen] * 3
    full = f'{{"a": "{8183 * "x"}"}}'
    own = {"chat_template_kwargs": {"style": "long"}, "top_k": -1}  # that keeps all, as vLLM has it
    args = {"agent": {"sampling": {"temperature": 0.5, "extra_body": own}}}
    merged = '{"enable_thinking": false, "style": "long"}'
    for said, temperature, want in ((chosen, 2.0, [merged]), (chosen, None, [merged]), (full, None, [])):
        hosted.policy.requests.clear()
        sampling = common_pb2.SamplingParams(temperature=temperature)
        request = hosted.request("trial-env", "ok", template_settings=said, sampling=sampling)
        request.environment.args_json = json.dumps(args)
        stream = hosted.stub.RunRollouts(request, timeout=60)
        (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
        assert [r.template_settings for r in hosted.policy.requests] == want
        assert not any(r.sampling.top_k for r in hosted.policy.requests)
        assert all(r.sampling.temperature == (temperature or 0.5) for r in hosted.policy.requests)
    assert kind(rollout) == "MODEL" and "at most 8192 travel" in rollout.failure.message
    with pytest.raises(grpc.RpcError) as caught:
        await hosted.run("ok", template_settings="[]")
    assert from_rpc(caught.value).metadata["field"] == "template_settings"


async def test_versions_and_run_are_passed_on(hosted: Any) -> None:
    await hosted.run("ok", min_policy_version=2, request_id="run/group-17/1-ab")
    (sent,) = hosted.policy.requests
    assert (sent.run_id, sent.min_policy_version, sent.session_id) == ("run", 2, "run/group#18")
    assert session_of("run/group-17/ab") == "run/group-17/ab"
    assert not sent.HasField("exact_policy_version")


async def test_a_token_limit_truncates_and_earns_nothing(hosted: Any) -> None:
    request = hosted.request("reverse-text", sampling=common_pb2.SamplingParams(max_tokens=20))
    rollouts = [f.rollout async for f in hosted.stub.RunRollouts(request, timeout=60)]
    assert rollouts[0].truncated and rollouts[0].reward == 0.0 and not rollouts[0].HasField("failure")


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


@pytest.mark.slow
async def test_tool_answers_are_carried_and_not_trained_on(hosted: Any) -> None:
    def script(request: Any, last: str) -> str:
        match last:
            case "what is 40 plus 2?":
                assert [tool.name for tool in request.tools] == ["calc_add", "calc_explode"]
                return 'call calc_add {"a": 40, "b": 2}'
            case "42":
                return "call calc_add not json"
            case str() if "Expecting value" in last:  # what this reader of JSON takes as none
                return f'call calc_add {{"a": {"9" * 5000}, "b": 2}}'
            case str() if "digits" in last:
                return f"call calc_add {'[' * TOO_DEEP}{']' * TOO_DEEP}"
            case str() if "too deeply" in last:
                return f"call calc_add {'[' * 250}{']' * 250}"
            case str() if "depth exceeded" in last:
                return 'call calc_add {"a": "\\ud800", "b": 2}'
        return f"it is 42 ({last[:12]})"

    hosted.policy.answer = script
    request = hosted.request("tool-env", task_index=0, timeout_ms=60_000, messages_of_members=1)
    stream = hosted.stub.RunRollouts(request, timeout=90)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    assert not rollout.HasField("failure"), rollout.failure
    assert rollout.reward == 1.0 and rollout.metrics["calls"] == 1.0 and rollout.num_turns == 7
    roles = ["user", *["assistant", "tool"] * 6, "assistant"]
    assert [m.role for m in rollout.messages] == roles
    assert rollout.messages[1].tool_calls[0].arguments_json == '{"a": 40, "b": 2}'
    assert rollout.messages[2].content == "42" and all(
        "not JSON" in rollout.messages[wrong].content for wrong in (4, 6, 8, 10, 12)
    )
    (sample,) = rollout.samples
    covered = sum(span.length for span in sample.spans)
    assert covered == rollout.usage.completion_tokens and rollout.prefix_breaks == 0


async def test_a_model_that_never_stops_calling_tools_is_cut_short(hosted: Any) -> None:
    hosted.policy.answer = lambda request, last: 'call calc_add {"a": 1, "b": 1}'
    request = hosted.request("tool-env", task_index=0, timeout_ms=250_000)
    request.environment.args_json = '{"calls_divided_by": 16}'  # 512 take half a minute
    stream = hosted.stub.RunRollouts(request, timeout=280)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    assert not rollout.HasField("failure"), rollout.failure
    assert rollout.truncated and rollout.stop_condition == "too_many_model_calls"
    assert rollout.num_turns == 512 // 16 and rollout.reward == 0.0
