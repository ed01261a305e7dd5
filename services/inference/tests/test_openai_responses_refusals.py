"""POST /v1/responses: what it says to chat, what it refuses, and how a response fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pydantic
import pytest
from openai.types.responses import ResponseErrorEvent, ResponseFailedEvent
from quartet_inference.engine import Delta, Request, Span
from quartet_inference.openai.errors import unsupported
from quartet_inference.openai.responses import body
from quartet_inference.openai.responses.body import parse_responses
from quartet_inference.openai.wishes import Wishing

from .openai_door import Door, opened, say, until

FUNCTION: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
MESSAGE: Any = {"role": "user", "content": "x"}
NOT_KEPT = "send the items of the conversation in input"

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "at least one item"),
    ({"input": None}, "input", "Field required"),
    ({"input": ["x"]}, "input[0]", "an item is an object"),
    ({"input": [{"id": "msg_1"}]}, "input[0].type", NOT_KEPT),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "with store = false"),
    ({"input": [MESSAGE, {"type": "web_search_call", "id": "x"}]}, "input[1].type", "web_search_call"),
    ({"input": [MESSAGE, {"type": ["message"]}]}, "input[1].type", "send message"),
    ({"input": [{**MESSAGE, "role": "judge"}]}, "input[0].role", "Input should be"),
    ({"input": [{**MESSAGE, "mood": 1}]}, "input[0].mood", "leave it out"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[0].type", "send text, not input_image"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "mood": 1}]}]},
     "input[0].content[0].mood", "leave it out"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]", "has a type"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments", "required"),
    ({"input": [MESSAGE, {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
     "input[1].encrypted_content", "encrypted elsewhere"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "quartet.1.?"}]},
     "input[0].encrypted_content", "is not what was sent from here"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "no web_search is here"),
    ({"tools": [FUNCTION, {"type": "custom", "name": "f"}]}, "tools[1].type", "send tools of type function"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "required"),
    ({"tools": [{**FUNCTION, "output_schema": {}}]}, "tools[0].output_schema", "leave it out"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "choose a function"),
    ({"tool_choice": "any"}, "tool_choice", "Input should be"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "leave it out"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "json_schema"),
    ({"text": {"format": {"type": "json_schema", "name": "p"}}}, "text.format.schema", "send the schema"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "none of the"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort", "chat_template_kwargs"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "told whole"),
    ({"reasoning": "low"}, "reasoning", "an object"),
    ({"include": ["message.mood"]}, "include[0]", "not message.mood"),
    ({"include": ["reasoning.encrypted_content", "file_search_call.results"]}, "include[1]", "not file_"),
    ({"include": [3]}, "include[0]", "valid string"),
    ({"max_tool_calls": 3}, "max_tool_calls", "leave it out"),
    ({"top_logprobs": 3}, "top_logprobs", "only with include"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "less than or equal"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", NOT_KEPT),
    ({"conversation": "conv_1"}, "conversation", NOT_KEPT),
    ({"background": True}, "background", "wait for the answer"),
    ({"truncation": "auto"}, "truncation", "leave out what is too much"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "leave out"),
    ({"prompt": {"id": "p"}}, "prompt", "send instructions"),
    ({"messages": [MESSAGE]}, "messages", "send input"),
    ({"max_tokens": 3}, "max_tokens", "send max_output_tokens"),
    ({"response_format": {"type": "text"}}, "response_format", "send text.format"),
    ({"n": 2}, "n", "ask once for each"),
    ({"moderation": {"model": "x"}}, "moderation", "leave it out"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"stop_token_ids": [999]}, "stop_token_ids", "vocabulary"),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "leave it out"),
]  # fmt: skip


async def test_what_is_not_served_is_refused_by_name(door: Door) -> None:
    """body.py 1, items.py 3."""
    for extra, param, why in BAD:
        status, error = await door.refusal("responses", **{"model": door.model, "input": "x", **extra})
        assert (status, error["param"]) == (400, param), (extra, error)
        assert why in error["message"], (extra, error)
    status, error = await door.refusal("responses", model="another", input="x")
    assert (status, error["code"]) == (404, "model_not_found")
    status, error = await door.refusal("responses", model=door.model, input="x" * 300)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    async with aiohttp.ClientSession(f"http://{door.address}") as session:
        for raw in (b"{", b"[]"):
            async with session.post("/v1/responses", data=raw) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_json")
        async with session.post("/v1/responses/compact", json={"input": "x"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_url")
        async with session.get("/v1/responses") as response:
            assert response.status == 405 and (await response.json())["error"]["code"] == "wrong_method"
            assert response.headers["Allow"] == "POST"


async def test_what_asks_for_nothing_else_is_accepted(door: Door) -> None:
    """body.py 1."""
    harmless: dict[str, Any] = {
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
        "max_tool_calls": None,
        "background": False,
        "truncation": "disabled",
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}, "verbosity": None},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "conversation": None,
        "include": ["reasoning.encrypted_content"],
        "tools": [{**FUNCTION, "strict": None, "description": None}],
    }
    answer = await door.plain.responses.create(
        model=door.model, input="hi", max_output_tokens=2, **harmless, extra_body={"n": 1}
    )
    assert answer.status == "incomplete" and answer.metadata == {"a": "b"}
    echoed = answer.tools[0]
    assert echoed.type == "function" and (echoed.name, echoed.strict) == ("f", False)


def said_to_chat(monkeypatch: pytest.MonkeyPatch, **asked: Any) -> dict[str, Any]:
    """What chat is asked."""
    heard: list[dict[str, Any]] = []

    def chat_of(fields: dict[str, Any], wishing: Wishing) -> Any:
        heard.append(fields)
        return None, []

    monkeypatch.setattr(body, "chat_of", chat_of)
    parse_responses(json.dumps({"model": "m", "input": "x", **asked}).encode(), Wishing())
    return heard[0]


def test_forms_and_choices_are_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    """body.py 2, 3."""
    schema: Any = {"name": "p", "schema": {"type": "object"}, "strict": True}
    strict = {**FUNCTION, "strict": True, "description": "d"}
    asked = said_to_chat(
        monkeypatch,
        text={"format": {"type": "json_schema", **schema, "description": None}},
        tools=[strict],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        max_output_tokens=3,
        seed=7,
        min_policy_version=1,
    )
    function = {name: strict[name] for name in ("name", "description", "parameters", "strict")}
    assert asked == {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "max_completion_tokens": 3,
        "logprobs": False,
        "top_logprobs": 0,
        "seed": 7,
        "min_policy_version": 1,
    }
    named = {"type": "function", "name": "f"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    assert said_to_chat(monkeypatch, tools=[strict], tool_choice=choice)["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
    }
    assert said_to_chat(monkeypatch, tool_choice="required")["tool_choice"] == "required"
    form = {"type": "json_object"}
    assert said_to_chat(monkeypatch, text={"format": form})["response_format"] == form


@pytest.mark.parametrize(
    ("of_chat", "here"),
    [
        ("tools[3].function.strict", "tools[3].strict"),
        ("response_format", "text.format"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("max_completion_tokens", "max_output_tokens"),
    ],
)
def test_errors_and_wishes_have_the_names_that_were_sent(
    monkeypatch: pytest.MonkeyPatch, of_chat: str, here: str
) -> None:
    """body.py 1."""

    def refuse(fields: dict[str, Any], wishing: Wishing) -> Any:
        if not wishing.best_effort:
            raise unsupported(of_chat, f"send no {of_chat}")
        return None, [of_chat]

    monkeypatch.setattr(body, "chat_of", refuse)
    raw = json.dumps({"model": "m", "input": "x"}).encode()
    with pytest.raises(Exception, match="is not supported here") as refused:
        parse_responses(raw, Wishing())
    error = refused.value.body["error"]  # type: ignore[attr-defined]
    assert (error["param"], error["code"]) == (here, "unsupported_parameter")
    assert error["message"] == f"{here} is not supported here; send no {here}"
    assert parse_responses(raw, Wishing(best_effort=True))[2] == [here]


class Sum(pydantic.BaseModel):
    """What is parsed."""

    a: int


async def test_what_a_client_parsed_comes_back(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """items.py 3: `parse` adds to a message and to a call what it read in them."""
    async with opened(model_folder, openai={"best_effort": True}) as door:
        say(monkeypatch, door, '{"a": 2}')
        first = await door.plain.responses.parse(model=door.model, input="hi", text_format=Sum)
        assert first.output_parsed == Sum(a=2)
        call = '<tool_call>\n{"name": "Sum", "arguments": {"a": 3}}\n</tool_call>'
        say(monkeypatch, door, call)
        tool = openai.pydantic_function_tool(Sum)["function"]
        tools: Any = [{"type": "function", **tool}]
        asked: Any = {"model": door.model, "tools": tools}
        second = await door.plain.responses.parse(**asked, input="hi")
        (called,) = second.output
        assert called.type == "function_call" and called.parsed_arguments == {"a": 3}
        items: Any = [item.model_dump() for item in (*first.output, *second.output)]
        assert "parsed" in json.dumps(items) and "parsed_arguments" in json.dumps(items)
        output: Any = {"type": "function_call_output", "call_id": called.call_id, "output": "x"}
        assert (await door.plain.responses.create(**asked, input=[*items, output])).status == "completed"


async def test_a_stream_that_fails_is_raised_and_told(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """events.py 1, 4."""
    async with opened(model_folder, openai={"request_seconds": 1.5}) as door:

        async def one_word(request: Request) -> AsyncIterator[Delta]:
            for _ in range(3):
                yield Delta(0, [71, 72], [-1.0, -1.0], [Span(0, 2, 0)])
                await asyncio.sleep(0.7)  # the limit is for each piece
            await asyncio.Event().wait()

        monkeypatch.setattr(door.engine, "generate", one_word)
        with pytest.raises(openai.APIError, match="longer than") as broken:
            async for _ in await door.plain.responses.create(model=door.model, input="hi", stream=True):
                pass
        assert broken.value.code == "timeout"
        events = await raw_events(door)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert len([event for event in events if event["type"].endswith("text.delta")]) == 3
        error, failed = events[-2:]
        assert ResponseErrorEvent.model_validate(error).code == "timeout"
        response = ResponseFailedEvent.model_validate(failed).response
        assert response.status == "failed" and response.error is not None
        assert response.id == events[0]["response"]["id"]
        await until(lambda: door.under_way() == 0)
        say(monkeypatch, door, "Well.")
        door.allow(60)
        assert (await raw_events(door))[-1]["type"] == "response.completed"


async def raw_events(door: Door) -> list[dict[str, Any]]:
    """The events of a stream; each has its name above it, and nothing is told beside them."""
    asked = {"model": door.model, "input": "hi", "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{door.address}/v1/responses", json=asked) as answer,
    ):
        told = [event.splitlines() for event in (await answer.text()).strip().split("\n\n")]
    events = []
    for name, data in (event for event in told if event != [": alive"]):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_leaves_ends_its_generation(door: Door, stream: bool) -> None:
    await door.engine.pause()
    body = {"model": door.model, "input": "hi", "stream": stream}
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.post(f"http://{door.address}/v1/responses", json=body))
        await until(lambda: door.engine.info().waiting == 1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await until(lambda: door.engine.info().waiting == 0)
    assert door.engine.info().tokens_sampled == 0
