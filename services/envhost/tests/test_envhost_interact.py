"""Interact: the client is the policy. Invariants by their module: dialogue.py 1-2, quartet.interact 1-2."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError, from_rpc
from quartet.interact import interact
from quartet.v1 import common_pb2, envhost_service_pb2
from quartet_envhost import service as service_module
from rollout_outcomes import kind

pytestmark = pytest.mark.asyncio(loop_scope="session")


def sampled(question: Any, text: str, version: int = 7) -> Any:
    """What a client with the tests' tokenizer answers: the prefix extended, then `text`."""
    from scripted_inference import CLOSE, OPENING, encode, render

    tokens = [*encode(text), CLOSE]
    tail = render(question.messages[question.prefix_messages :])
    return envhost_service_pb2.ModelAnswer(
        prompt_token_ids=[*question.prefix_token_ids, *tail, *OPENING],
        token_ids=tokens,
        logprobs=[-0.5] * len(tokens),
        message=common_pb2.Message(content=text),
        policy_version=version,
    )


async def rollouts_of(hosted: Any, mode: str, policy: Any, **fields: Any) -> list[Any]:
    run = hosted.request("trial-env", mode, **fields)
    return [rollout async for rollout in interact(hosted.stub, run, policy, timeout_s=60)]


async def test_the_client_is_the_policy(hosted: Any) -> None:
    """Invariant 6: what the client sampled is the sample, and inference is never asked."""
    asked: list[Any] = []

    async def policy(question: Any) -> Any:
        asked.append(question)
        await asyncio.sleep(0.02 * (4 - question.member))  # answered in another order than asked
        return sampled(question, f"said by {question.member}")

    sampling = common_pb2.SamplingParams(seed=5, max_tokens=99)
    settings = '{"enable_thinking": false}'
    fields = {"messages_of_members": 4, "sampling": sampling, "template_settings": settings}
    rollouts = await rollouts_of(hosted, "two_turns", policy, members=range(4), **fields)
    assert not hosted.policy.requests
    assert sorted(r.member for r in rollouts) == [0, 1, 2, 3]
    for rollout in rollouts:
        assert not rollout.HasField("failure"), rollout.failure
        assert rollout.num_turns == 3 and rollout.prefix_breaks == 0
        (sample,) = rollout.samples
        mine = [q for q in asked if q.member == rollout.member]
        last = sampled(mine[-1], f"said by {rollout.member}")
        assert list(sample.token_ids) == [*last.prompt_token_ids, *last.token_ids]
        assert {s.policy_version for s in sample.spans} == {7} and len(sample.spans) == 3
        assert sum(s.length for s in sample.spans) == len(sample.logprobs)
        assert {m.content for m in rollout.messages[1::2]} == {f"said by {rollout.member}"}
        assert [len(q.messages) for q in mine] == [1, 3, 5] and [q.prefix_messages for q in mine] == [0, 2, 4]
    assert len({q.call_id for q in asked}) == 12
    assert len({q.sampling.seed for q in asked}) == 12 and {q.sampling.max_tokens for q in asked} == {99}
    assert {q.template_settings for q in asked} == {settings}


async def test_a_client_that_cannot_answer_fails_one_rollout(hosted: Any) -> None:
    """Invariant 5."""

    async def policy(question: Any) -> Any:
        if question.member == 1:
            raise RuntimeError("out of\nmemory")
        return sampled(question, "ok")

    rollouts = await rollouts_of(hosted, "ok", policy, members=range(3))
    failed = {r.member: r for r in rollouts if r.HasField("failure")}
    assert set(failed) == {1} and kind(failed[1]) == "MODEL"
    assert "RuntimeError: out of memory" in failed[1].failure.message


async def test_the_clients_time_is_the_rollouts(hosted: Any) -> None:
    """Invariant 7."""

    async def policy(question: Any) -> Any:
        if question.member:
            await asyncio.sleep(30)
        return sampled(question, "ok")

    rollouts = await asyncio.wait_for(
        rollouts_of(hosted, "ok", policy, members=range(2), timeout_ms=3000), 60
    )
    assert [kind(r) for r in sorted(rollouts, key=lambda r: r.member)] == ["UNSPECIFIED", "TIMEOUT"]


async def test_an_interaction_is_tried_again_and_cancelled_as_a_run_is(hosted: Any) -> None:
    async def policy(question: Any) -> Any:
        return sampled(question, "ok")

    run = {"members": [0], "max_retries": 1, "timeout_ms": 20_000}
    (rollout,) = await rollouts_of(hosted, "exits_once", policy, **run)
    assert not rollout.HasField("failure"), rollout.failure
    asked = asyncio.Event()

    async def never(_question: Any) -> Any:
        asked.set()
        await asyncio.sleep(30)

    doomed = asyncio.create_task(rollouts_of(hosted, "ok", never, request_id="doomed", members=range(2)))
    await asyncio.wait_for(asked.wait(), 60)
    cancel = envhost_service_pb2.CancelRequest(run_id="run", request_ids=["doomed"])
    assert (await hosted.stub.Cancel(cancel, timeout=20)).cancelled == 2
    assert [kind(r) for r in await asyncio.wait_for(doomed, 60)] == ["CANCELLED"] * 2
    assert hosted.host.in_flight == 0


async def converse(hosted: Any, *answers: Any, opening: bool = True) -> list[Any]:
    """Frames of a call that opens, sends these answers once it was asked, and ends its side."""
    asked = asyncio.Event()

    async def requests() -> Any:
        if opening:
            yield envhost_service_pb2.InteractRequest(run=hosted.request("trial-env"))
            await asked.wait()
        for answer in answers:
            yield envhost_service_pb2.InteractRequest(answer=answer)

    frames = []
    async for frame in hosted.stub.Interact(requests(), timeout=30):
        frames.append(frame)
        if frame.HasField("question"):
            asked.set()
    return frames


async def test_a_client_that_ends_its_side_answers_nothing_more(hosted: Any) -> None:
    frames = await asyncio.wait_for(converse(hosted), 60)
    rollout = frames[-1].rollout
    assert kind(rollout) == "MODEL" and "ended its side" in rollout.failure.message


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        ({"call_id": 9, "prompt_token_ids": [1], "token_ids": [1], "logprobs": [0.0]}, "answer.call_id"),
        ({"call_id": 1, "prompt_token_ids": [1], "token_ids": [1, 2], "logprobs": [0.0]}, "answer.logprobs"),
        (
            {"call_id": 1, "prompt_token_ids": [1], "token_ids": [1], "logprobs": [float("nan")]},
            "answer.logprobs",
        ),
        ({"call_id": 1, "prompt_token_ids": [1], "token_ids": [1], "logprobs": [0.7]}, "answer.logprobs"),
        ({"call_id": 1, "prompt_token_ids": [1]}, "answer.token_ids"),
        ({"call_id": 1, "prompt_token_ids": [1], "token_ids": [1], "logprobs": [0.0]}, "answer.message"),
        ({"call_id": 1, "token_ids": [1], "logprobs": [0.0]}, "answer.prompt_token_ids"),
    ],
)
async def test_what_is_no_answer_ends_the_call(hosted: Any, answer: Any, field: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.wait_for(converse(hosted, envhost_service_pb2.ModelAnswer(**answer)), 60)
    error: QuartetError = from_rpc(caught.value)
    assert (error.reason, error.metadata["field"]) == ("INVALID_REQUEST", field)
    assert hosted.host.in_flight == 0


async def test_a_call_begins_with_what_to_run(hosted: Any) -> None:
    for answers in ([], [envhost_service_pb2.ModelAnswer(call_id=1)]):
        with pytest.raises(grpc.RpcError) as caught:
            await converse(hosted, *answers, opening=False)
        assert from_rpc(caught.value).metadata["field"] == "frame"


async def test_a_call_that_opens_with_nothing_ends(hosted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: it holds one of the server's places."""
    monkeypatch.setattr(service_module, "OPENING_SECONDS", 0.2)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asyncio.wait_for(hosted.stub.Interact(timeout=60).read(), 60)
    error = from_rpc(refused.value)
    assert error.reason == "INVALID_REQUEST" and "within 0.2 s" in error.message
