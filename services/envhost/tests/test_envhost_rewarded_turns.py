"""Conversations of "reward-service" with several turns, played: a RewardService of this process that goes on
with them, and real workers. Invariants by their module: rewarded/*.py."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError
from quartet.interact import interact
from quartet.kit.options import MAX_MESSAGE_BYTES
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import reward_service_pb2 as pb
from quartet.v1 import reward_service_pb2_grpc
from rewarded_host import Rewarded
from rollout_outcomes import kind, refusal, until
from scripted_inference import CLOSE, OPENING, encode, render, says
from scripted_rewards import UNKNOWN, WORDS, asks, goes_on

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD = {"name": "add", "description": "The sum.", "parameters_json": '{"type": "object", "properties": {}}'}
CALL = 'call add {"a": 2}'


def with_turns(host: Rewarded) -> Rewarded:
    """With a tool, whose calls are answered, in conversations of three answers at most."""
    host.rewards.described.max_turns = 3
    host.rewards.splits[epb.SPLIT_TRAIN] = [asks(word, tools=[ADD]) for word in WORDS]
    host.rewards.goes_on = results
    return host


@pytest.fixture
def turns(lasting: Rewarded) -> Rewarded:
    """For whoever leaves the prompts alone."""
    return with_turns(lasting)


def results(request: pb.ContinueRequest) -> pb.ContinueResponse:
    """Of each call its result; at most nine tokens are said of it."""
    calls = request.messages[-1].tool_calls
    messages = [
        {"role": "tool", "content": "five", "tool_call_id": one.id, "name": one.name} for one in calls
    ]
    return pb.ContinueResponse(messages=messages, max_tokens=9 if calls else 0)


async def test_calls_are_answered_until_there_are_none(turns: Rewarded) -> None:
    """turns.py 1, play.py 1: one sample, in which what the service said is not covered."""
    turns.policy.answer = says(CALL, "it is five")
    (rollout,) = await turns.run(
        1,
        members=[3],
        messages_of_members=4,
        sampling={"seed": 5, "max_tokens": 99, "min_tokens": 15},
        routed_experts=True,
    )
    assert not rollout.HasField("failure"), rollout.failure
    first, then = turns.policy.requests
    assert [tool.name for tool in first.tools] == [tool.name for tool in then.tools] == ["add"]
    assert (first.sampling.max_tokens, then.sampling.max_tokens) == (99, 9)
    assert (first.sampling.min_tokens, then.sampling.min_tokens) == (15, 9)
    (first_seed,) = first.completion_seeds or [first.sampling.seed]
    assert first_seed != then.sampling.seed
    prompt = [*render(asks("green").messages.messages), *OPENING]
    called = [*encode(CALL), CLOSE]
    assert list(then.tokens.token_ids) == [*prompt, *called]
    assert [(one.role, one.content) for one in then.tokens.tail_messages] == [("tool", "five")]
    assert (first.experts_from, then.experts_from) == (0, len(prompt) + len(called) - 1)
    between = [*render(then.tokens.tail_messages), *OPENING]
    cut = [*encode("it is five"), CLOSE][:9]
    (sample,) = rollout.samples
    assert list(sample.token_ids) == [*prompt, *called, *between, *cut]
    spans = [(span.start, span.length) for span in sample.spans]
    assert spans == [(len(prompt), len(called)), (len(prompt) + len(called) + len(between), 9)]
    assert (rollout.num_turns, rollout.truncated, rollout.prefix_breaks) == (2, True, 0)
    (continued,) = turns.rewards.continued
    assert (continued.run_id, continued.split, continued.index, continued.member) == ("run", 1, 1, 3)
    assert continued.token_count == len(called) and [one.role for one in continued.messages] == ["assistant"]
    assert continued.messages[0].tool_calls[0].arguments_json == '{"a": 2}'
    (said,) = turns.rewards.groups[0].completions
    assert list(said.token_ids) == [*called, *between, *cut] and said.truncated
    assert [one.role for one in said.messages] == ["assistant", "tool", "assistant"]
    assert said.messages[2] == said.message and said.message.content == "it is fiv"
    assert [one.role for one in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.usage.completion_tokens == len(called) + 9
    assert rollout.usage.prompt_tokens == 2 * len(prompt) + len(called) + len(between)


async def test_a_conversation_ends_where_the_service_has_nothing_to_add(turns: Rewarded) -> None:
    turns.policy.answer = says("five")
    (rollout,) = await turns.run(0)
    assert (rollout.num_turns, rollout.truncated, rollout.stop_condition) == (1, False, "completed")
    assert len(turns.rewards.continued) == 1 and not turns.rewards.groups[0].completions[0].messages


async def test_a_user_may_go_on(turns: Rewarded) -> None:
    """turns.py 1: whatever it says, as often as the description has it."""
    more = pb.ContinueResponse(messages=[{"role": "user", "content": "more"}])
    turns.rewards.goes_on = lambda request: more
    turns.policy.answer = says("a", "b", "c")
    (rollout,) = await turns.run(0, messages_of_members=1)
    assert [one.content for one in rollout.messages] == ["red", "a", "more", "b", "more", "c"]
    assert (rollout.num_turns, rollout.truncated, rollout.stop_condition) == (3, False, "completed")
    assert [len(one.messages) for one in turns.rewards.continued] == [1, 3], "not after the last answer"


async def test_calls_without_end(turns: Rewarded) -> None:
    """turns.py 1"""
    turns.policy.answer = lambda request, last: CALL
    turns.rewards.goes_on = lambda request: pb.ContinueResponse(messages=results(request).messages)
    (rollout,) = await turns.run(0)
    assert (rollout.num_turns, rollout.stop_condition) == (3, "max_turns_reached") and rollout.truncated
    assert not turns.rewards.groups[0].completions[0].truncated, "no limit of tokens cut it"


async def test_what_is_not_gone_on_with(own: Rewarded) -> None:
    """turns.py 1: what was cut, and a prompt of tokens."""
    turns = with_turns(own)
    turns.policy.answer = lambda request, last: CALL
    (cut,) = await turns.run(0, sampling={"max_tokens": 4})
    turns.rewards.splits[epb.SPLIT_TRAIN][3] = goes_on("red")
    (of_tokens,) = await turns.run(3)
    assert cut.truncated and (cut.num_turns, of_tokens.num_turns) == (1, 1)
    assert not turns.rewards.continued


async def test_a_template_that_renders_anew(turns: Rewarded) -> None:
    turns.policy.answer, turns.policy.forgets = says(CALL, "it is"), True
    (rollout,) = await turns.run(0)
    assert (rollout.prefix_breaks, len(rollout.samples)) == (1, 2)


async def test_a_conversation_that_the_context_does_not_hold(turns: Rewarded) -> None:
    """turns.py 2"""
    tokens = encode(CALL)

    async def policy(question: Any) -> Any:
        if question.prefix_token_ids:
            return epb.ModelAnswer(error="no room")
        call = {"id": "1", "name": "add", "arguments_json": "{}"}
        return epb.ModelAnswer(
            prompt_token_ids=render(question.messages),
            token_ids=tokens,
            logprobs=[-0.5] * len(tokens),
            message={"tool_calls": [call]},
        )

    run = turns.request(0, messages_of_members=1)
    (failed,) = [one async for one in interact(turns.stub, run, policy, timeout_s=60)]
    assert kind(failed) == "MODEL" and "no room" in failed.failure.message
    turns.policy.answer = says(CALL, "unheard")
    long = QuartetError("PROMPT_TOO_LONG", "99 tokens, limit 98")

    def go_on(request: pb.ContinueRequest) -> pb.ContinueResponse:
        turns.policy.errors = [long]
        return results(request)

    turns.rewards.goes_on = go_on
    (rollout,) = await turns.run(0, messages_of_members=1)
    assert not rollout.HasField("failure"), rollout.failure
    assert [one.role for one in rollout.messages] == ["user", "assistant"], "and not what did not fit"
    assert (rollout.stop_condition, rollout.truncated, rollout.num_turns) == ("prompt_too_long", True, 1)
    assert rollout.reward == 0.0 and len(turns.rewards.groups[-1].completions[0].token_ids) == len(CALL) + 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            pb.ContinueResponse(messages=[{"role": "assistant", "content": "a"}]),
            "a message of role 'assistant'",
        ),
        (pb.ContinueResponse(messages=[{"content": "a"}]), "a message of role ''; it should be 'tool'"),
        (pb.ContinueResponse.FromString(UNKNOWN), "upgrade the environment host, or leave that out"),
    ],
)
async def test_an_answer_that_breaks_the_contract(
    turns: Rewarded, answer: pb.ContinueResponse, said: str
) -> None:
    """turns.py 3"""
    turns.policy.answer, turns.rewards.goes_on = says(CALL), lambda request: answer
    (rollout,) = await turns.run(0)
    assert kind(rollout) == "ENVIRONMENT" and said in rollout.failure.message
    assert not turns.rewards.groups, "nothing to score"


@pytest.mark.parametrize(
    ("reason", "failed"),
    [
        ("INVALID_REQUEST", "ENVIRONMENT"),
        ("SCORER_FAILED", "ENVIRONMENT"),
        ("OVERLOADED", "UNSPECIFIED"),
    ],
)
async def test_a_service_that_refuses_to_go_on(turns: Rewarded, reason: str, failed: str) -> None:
    """turns.py 3, asked.py 2: what may pass is asked again."""
    turns.policy.answer = says(CALL, "five")
    turns.rewards.errors = [QuartetError(reason, "no calculator")]
    (rollout,) = await turns.run(0)
    assert kind(rollout) == failed and ("no calculator" in rollout.failure.message) == (
        failed != "UNSPECIFIED"
    )
    assert len(turns.rewards.continued) == (1 if failed == "ENVIRONMENT" else 3)


async def test_what_a_service_with_turns_says_of_itself(own: Rewarded) -> None:
    """environment.py 1: turns and tools are a part of what it is."""
    before = await own.describe()
    own.rewards.described.max_turns = 1
    # Loaded under another address, as another worker loads it.
    other = own.ref(address=own.address.replace("127.0.0.1", "localhost"))
    assert (await own.describe(other)).digest == before.digest, "one answer is what it was"
    own.rewards.described.max_turns = 1025
    error = await refusal(
        own.stub.DescribeEnvironment(
            epb.DescribeEnvironmentRequest(environment=own.ref(security={})), timeout=60
        )
    )
    assert "max_turns is 1025; it should be 1024 at most" in error.message


async def test_tools_are_shown_with_the_task(own: Rewarded) -> None:
    turns = with_turns(own)
    (task,) = await turns.tasks(count=1, include_data=True)
    assert json.loads(task.data_json)["tools"] == [ADD]
    of_tokens = goes_on("red")
    of_tokens.tools.add(name="add")
    turns.rewards.splits[epb.SPLIT_TRAIN][0] = of_tokens
    (rollout,) = await turns.run(0)
    assert kind(rollout) == "ENVIRONMENT" and "has tools, and is no conversation" in rollout.failure.message


async def test_a_service_that_has_turns_and_no_way_to_go_on(turns: Rewarded) -> None:
    turns.policy.answer = says(CALL)
    turns.rewards.errors = [QuartetError("NOT_IMPLEMENTED", "Method not found!")]
    (rollout,) = await turns.run(0)
    assert kind(rollout) == "ENVIRONMENT" and "max_turns above 1, and no Continue" in rollout.failure.message


async def test_a_service_that_hangs_is_named(own: Rewarded) -> None:
    """turns.py 3, waited.py 2: of a group of one, too, whose time the worker's own clock counts."""
    turns = with_turns(own)
    await turns.run(1)
    turns.rewards.holds_before = asyncio.Event()
    for index, members in ((0, 1), (1, 1), (1, 2)):
        turns.policy.answer = lambda request, last: CALL
        rollouts = await turns.run(index, members=range(members), timeout_ms=2000)
        assert {kind(one) for one in rollouts} == {"TIMEOUT"}, rollouts
        what = "there is no prompt" if index == 0 else "the conversation does not go on"
        assert all(
            one.failure.message.startswith(f"{what}: RewardService at {turns.address} did not answer in time")
            for one in rollouts
        ), rollouts
    await asyncio.wait_for(until(lambda: turns.rewards.cancelled == 4), 30)


async def test_a_conversation_that_fits_into_no_message(turns: Rewarded) -> None:
    """turns.py 3: the size, the limit, and what to do."""
    half = "x" * (MAX_MESSAGE_BYTES // 2)
    turns.rewards.goes_on = lambda request: pb.ContinueResponse(messages=[{"role": "user", "content": half}])

    async def policy(question: Any) -> Any:
        return epb.ModelAnswer(
            prompt_token_ids=[5] if not question.prefix_token_ids else [*question.prefix_token_ids, 5],
            token_ids=[6],
            logprobs=[-0.5],
            message={"content": half if question.prefix_token_ids else "a"},
        )

    run = turns.request(0, messages_of_members=1)
    (rollout,) = [one async for one in interact(turns.stub, run, policy, timeout_s=60)]
    assert kind(rollout) == "HOST" and not rollout.failure.retryable
    assert re.search(
        rf"2 answers has 4194\d\d\d bytes, .* \({MAX_MESSAGE_BYTES}\): let the service say less",
        rollout.failure.message,
    ), rollout.failure
    assert len(turns.rewards.continued) == 1, "it is not sent"


async def test_messages_that_only_one_end_takes(turns: Rewarded) -> None:
    """asked.py 1: of a server that has limits of its own, or none."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1000)])
    add: Any = reward_service_pb2_grpc.add_RewardServiceServicer_to_server
    add(turns.rewards, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    turns.policy.answer = says(CALL, f'call add {{"a": "{"y" * 1000}"}}', CALL)
    turns.rewards.goes_on = lambda request: pb.ContinueResponse(
        messages=[{"role": "tool", "content": "x" * (MAX_MESSAGE_BYTES if request.index else 1)}]
    )
    try:
        large, answered = [(await turns.run(n, environment=turns.ref(address=address)))[0] for n in (0, 1)]
    finally:
        await server.stop(0)
    assert kind(large) == kind(answered) == "ENVIRONMENT"
    text = rf"does not go on: RewardService at {address} takes messages of 1000 bytes, .* has 1\d\d\d; raise"
    assert re.search(text, large.failure.message), large.failure
    text = rf"at {address} answers in 41943\d\d bytes, .* \({MAX_MESSAGE_BYTES}\); let it say less at once"
    assert re.search(text, answered.failure.message), answered.failure
