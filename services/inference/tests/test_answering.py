"""Requests and their ends between the doors and an engine that writes what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.inference import MAX_COMPLETIONS
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet_inference import answering, conversations
from quartet_inference.answering import Answerer, Ended
from quartet_inference.chat import Chat
from quartet_inference.config import InferenceConfig
from quartet_inference.conversations import Conversations
from quartet_inference.engine import Delta, EngineInfo, Event, Finish, Reason, Request, ServedWeights, Span
from quartet_inference.updates import ServedNews

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Writing:
    """An engine as far as an answerer can see."""

    def __init__(self, tokens: list[int] | None = None, finish: Finish | None = None) -> None:
        self.tokens = tokens or [1]
        self.finish = finish or Finish(0, Reason.LENGTH, "", None, 0)
        self.served: ServedWeights | None = ServedWeights("r", 3, b"")
        self.paused = False
        self.asked: list[Request] = []

    def info(self) -> EngineInfo:
        return EngineInfo("", "float32", 256, 1, 260, (258,), self.served, 0, 0, 0, 0, 0.0, self.paused)

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        self.asked.append(request)
        yield Delta(0, self.tokens, [-1.0] * len(self.tokens), [Span(0, len(self.tokens), 3)])
        yield self.finish


@pytest.fixture(scope="module")
def chat(model_folder: Path) -> Chat:
    return Chat(model_folder)


def answerer(
    engine: Any, chat: Chat, wait_s: float = 0.0, in_vain: Callable[[str, float], str] = lambda *_: ""
) -> tuple[Answerer, ServedNews, list[str]]:
    """And the runs that were missing, and how it is told that others are served."""
    news, missing = ServedNews(engine), list[str]()
    return Answerer(engine, chat, news, wait_s, missing.append, in_vain), news, missing


def asked(**fields: Any) -> pb.GenerateRequest:
    messages = pb.MessagesPrompt(messages=[common_pb2.Message(role="user", content="hi")])
    request = pb.GenerateRequest(messages=messages, **fields)
    request.tools.add(name="add", parameters_json='{"type": "object"}')
    return request


async def end_of(answers: Answerer, request: pb.GenerateRequest) -> Ended:
    return [one async for one in answers.answer(request, None)][-1]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("written", "finish", "reason", "content", "calls"),
    [
        ("hello.", (Reason.STOP, "", None), pb.FINISH_REASON_STOP, "hello", 0),  # "." is the model's end
        ("hello.", (Reason.STOP, "", ord(".")), pb.FINISH_REASON_STOP, "hello", 0),
        ("hello.", (Reason.STOP, "lo", None), pb.FINISH_REASON_STOP, "hel", 0),
        ("hello.", (Reason.LENGTH, "", None), pb.FINISH_REASON_LENGTH, "hello.", 0),
        (f"{CALL}.", (Reason.STOP, "", None), pb.FINISH_REASON_TOOL_CALLS, "", 1),
        (f"{CALL}!", (Reason.STOP, "!", None), pb.FINISH_REASON_STOP, "", 1),
        (CALL, (Reason.LENGTH, "", None), pb.FINISH_REASON_LENGTH, "", 1),
    ],
)
async def test_what_ends_a_completion_is_none_of_its_text_and_says_whether_it_calls(
    chat: Chat, written: str, finish: tuple[Any, ...], reason: pb.FinishReason, content: str, calls: int
) -> None:
    how, stop, token = finish
    token = None if token is None else chat.encode(chr(token))[0]
    engine: Any = Writing(chat.encode(written), Finish(0, how, stop, token, 7))
    answers, _, _ = answerer(engine, chat)
    for times in (1, 2):
        ended = await end_of(answers, asked())
        assert (ended.reason, ended.message.content, len(ended.message.tool_calls)) == (
            reason,
            content,
            calls,
        )
        assert ended.stop_match == (stop or ("" if token is None else "."))
        assert ended.completion_tokens == len(engine.tokens) and ended.cached_tokens == 7
        assert answers.prompt_tokens == times * ended.prompt_tokens > 0 and answers.cached_tokens == times * 7


async def test_completions_are_bounded(chat: Chat) -> None:
    """Invariant 8: MAX_COMPLETIONS of one request."""
    engine: Any = Writing()
    answers, _, _ = answerer(engine, chat)
    await end_of(answers, asked(n=MAX_COMPLETIONS))
    with pytest.raises(QuartetError) as failure:
        await end_of(answers, asked(n=MAX_COMPLETIONS + 1))
    assert failure.value.metadata["field"] == "n" and [one.n for one in engine.asked] == [MAX_COMPLETIONS]


def test_what_is_kept_anew_or_recalled_is_forgotten_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """conversations.py 1: and counts once."""
    held = Conversations()
    said = ({"role": "user", "content": "x" * 100},)
    monkeypatch.setattr(conversations, "MAX_CHARACTERS", 2 * len(str(said[0])))
    for one in (1, 2, 1):
        held.keep([one], "", said)
    assert held.recall([2], "") == said
    held.keep([3], "", said)
    assert [held.recall([one], "") for one in (1, 2, 3)] == [None, said, said]


@pytest.mark.parametrize(
    ("fields", "field", "remedy"),
    [
        ({"run_id": "../x"}, "run_id", "use 1 to 64 of"),
        ({"run_id": "..", "min_policy_version": 3}, "run_id", "not dots alone"),
        ({"run_id": "r", "min_policy_version": 9, "exact_policy_version": 5}, "min_policy_version", "is 5"),
        ({"messages": {"messages": [{"role": "user"}, {"content": "hi"}]}}, "messages[1].role", "whose"),
        (
            {"tokens": {"token_ids": [1], "tail_messages": [{"content": "hi"}]}},
            "tokens.tail_messages[0].role",
            "whose",
        ),
    ],
)
async def test_what_no_waiting_mends_is_refused_at_once(
    chat: Chat, fields: dict[str, Any], field: str, remedy: str
) -> None:
    engine: Any = Writing()
    answers, _, missing = answerer(engine, chat, wait_s=600.0)
    request = asked()
    request.MergeFrom(pb.GenerateRequest(**fields))
    if request.HasField("messages") and "messages" in fields:
        del request.messages.messages[0]
    with pytest.raises(QuartetError) as failure:
        await asyncio.wait_for(end_of(answers, request), 5)
    assert (failure.value.reason, failure.value.metadata["field"]) == ("INVALID_REQUEST", field)
    assert remedy in failure.value.message and not missing and not engine.asked


async def test_what_is_waited_for_is_said_as_far_as_the_replica_knows(chat: Chat) -> None:
    engine: Any = Writing()
    answers, _, _ = answerer(engine, chat)
    assert answers.waits_for(asked(run_id="r", min_policy_version=3)) == ""
    said = answers.waits_for(asked(run_id="nobody"))
    assert said == "run nobody, which is not served here; what is served: run r"
    said = answers.waits_for(asked(min_policy_version=9))
    assert said == "version 9 of run r; version 3 is served"
    engine.paused = True
    assert answers.waits_for(asked()) == answering.PAUSED
    assert not answers.held_up(asked(run_id="nobody")), "nothing is known to keep it from coming"
    engine.served = None
    assert answers.waits_for(asked()).endswith("what is served: nothing")


async def test_a_replica_that_follows_the_newest_run_says_so(chat: Chat, model_folder: Path) -> None:
    engine: Any = Writing()
    config = InferenceConfig(model=model_folder, weights_address="127.0.0.1:1")
    answers = Answerer(engine, chat, ServedNews(engine), 0.0, follows=config.follows)
    with pytest.raises(
        QuartetError, match="what is served: run r; this replica follows the run that its trainer"
    ):
        await end_of(answers, asked(run_id="earlier"))
    assert "give it the run_id of another" in answers.waits_for(asked(run_id="earlier"))
    for settings in ({}, {"accept_push": True}, {"weights_address": "127.0.0.1:1", "run_id": "r"}):
        assert not InferenceConfig.model_validate({"model": model_folder, **settings}).follows


async def test_what_an_engine_is_asked_is_kept_for_those_who_come_back(chat: Chat) -> None:
    """GenerateRequest.session_id"""
    engine: Any = Writing()
    answers, _, _ = answerer(engine, chat)
    for session in ("", "s"):
        await end_of(answers, asked(session_id=session))
    assert [one.keep_prefix for one in engine.asked] == [False, True]


async def test_a_request_waits_for_weights_where_it_names_some_and_their_run_is_looked_for(
    chat: Chat,
) -> None:
    engine: Any = Writing()
    answers, _, missing = answerer(engine, chat)
    with pytest.raises(QuartetError) as failure:
        await end_of(answers, asked(run_id="other"))
    assert (failure.value.reason, missing) == ("RUN_NOT_SERVED", ["other"])
    with pytest.raises(QuartetError) as failure:
        await end_of(answers, asked(run_id="r", min_policy_version=4))
    assert failure.value.reason == "DEADLINE" and missing == ["other"]

    engine = Writing()
    engine.served = None
    answers, news, missing = answerer(engine, chat, wait_s=600.0)
    with pytest.raises(QuartetError) as failure:
        await end_of(answers, asked())
    assert failure.value.reason == "NOT_READY"
    waiting = asyncio.create_task(end_of(answers, asked(min_policy_version=3)))
    await asyncio.sleep(0)
    assert not waiting.done()
    engine.served = ServedWeights("r", 3, b"")
    news.tell()
    assert (await asyncio.wait_for(waiting, 30)).reason == pb.FINISH_REASON_LENGTH and not missing


async def test_a_run_that_cannot_come_is_refused_while_others_are_served_and_waited_for_while_none_are(
    chat: Chat,
) -> None:
    """answering.py 2"""
    engine: Any = Writing()
    answers, news, missing = answerer(
        engine, chat, wait_s=600.0, in_vain=lambda run_id, since: "it is no run"
    )
    with pytest.raises(QuartetError) as failure:
        await asyncio.wait_for(end_of(answers, asked(run_id="other")), 30)
    assert failure.value.reason == "RUN_NOT_SERVED" and not missing
    assert failure.value.message == "run other is not served: it is no run; what is served: run r"
    assert (await end_of(answers, asked(run_id="r"))).reason == pb.FINISH_REASON_LENGTH

    engine.served = None
    waiting = asyncio.create_task(end_of(answers, asked(run_id="other")))
    while not missing:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert missing == ["other"] and not waiting.done()
    engine.served = ServedWeights("other", 0, b"")
    news.tell()
    assert (await asyncio.wait_for(waiting, 30)).reason == pb.FINISH_REASON_LENGTH
