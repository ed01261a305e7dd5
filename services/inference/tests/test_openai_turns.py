"""Answers that come back as the next request's history, as client libraries write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet_inference.openai.bodies import parse_chat
from quartet_inference.openai.errors import OpenAiError
from quartet_inference.openai.wishes import Wishing

from .openai_door import TOOL, Door, requests_seen, say

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
USER: Any = {"role": "user", "content": "1+1?"}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[pb.GenerateRequest]:
    """The requests that the answerer gets."""
    return requests_seen(monkeypatch)


async def test_what_a_client_parsed_may_come_back(
    door: Door, monkeypatch: pytest.MonkeyPatch, sent: list[pb.GenerateRequest]
) -> None:
    """turns.py 1: the stream helper's own dump, and the answer of LiteLLM."""
    say(monkeypatch, door, CALL)
    state: Any = ChatCompletionStreamState(input_tools=[TOOL])
    async for chunk in await door.chat(tools=[TOOL], stream=True, max_tokens=200):
        state.handle_chunk(chunk)
    streamed = state.get_final_completion().choices[0].message.model_dump()
    assert "parsed_arguments" in streamed["tool_calls"][0]["function"]
    streamed["tool_calls"][0]["function"]["parsed_arguments"] = {"a": 1}  # as `parse` fills it
    (plain_call,) = [{**call, "provider_specific_fields": {}} for call in streamed["tool_calls"]]
    lite = {"role": "assistant", "content": None, "tool_calls": [plain_call]}
    lite["provider_specific_fields"] = {"refusal": None}
    for turn in ({**streamed, "parsed": {"a": 1}}, lite):
        result = {"role": "tool", "tool_call_id": plain_call["id"], "content": "2"}
        await door.chat(messages=[USER, turn, result], max_tokens=2)
        assert [m.role for m in sent[-1].messages.messages] == ["user", "assistant", "tool"]
        assert sent[-1].messages.messages[1].tool_calls[0].arguments_json == '{"a": 1}'


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "user", "content": "x", "parsed": {}},
        {"role": "assistant", "content": "x", "thinking_blocks": [{}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "", "x": 1}}],
        },
    ],
)
async def test_other_unknown_fields_are_refused(door: Door, turn: dict[str, Any]) -> None:
    """turns.py 1."""
    status, error = await door.refusal(model=door.model, messages=[turn, USER])
    assert (status, error["code"]) == (400, "unsupported_parameter"), error


def wire(*turns: Any) -> list[common_pb2.Message]:
    """The messages of the contract that these become, from the bytes of a body on."""
    body, _ = parse_chat(json.dumps({"model": "m", "messages": turns}).encode(), Wishing())
    (request,) = body.requests(9)
    return list(request.messages.messages)


def refusal(*turns: Any) -> dict[str, Any]:
    with pytest.raises(OpenAiError) as refused:
        wire(*turns)
    assert refused.value.status == 400
    error: dict[str, Any] = refused.value.body["error"]
    return error


def called(name: str, **more: Any) -> dict[str, Any]:
    return {"id": f"id of {name}", "function": {"name": name, "arguments": f'{{"{name}": 1}}'}, **more}


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_every_part_of_a_turn_has_its_place_and_its_order() -> None:
    spoken = {"content": "Well.", "reasoning_content": "Hm.", "annotations": []}
    calls = [called("b", index=0), called("a", type="function", index=1)]
    sent = wire(
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind.", "name": "dev"},
        {"role": "user", "content": [part("1+"), part("1"), part("?")], "name": "Ada"},
        {"role": "assistant", **spoken, "tool_calls": calls},
        {"role": "tool", "content": [part("2"), part("!")], "tool_call_id": "id of b", "name": "b"},
        {"role": "tool", "content": "", "tool_call_id": "id of a"},
    )
    wanted = [
        common_pb2.Message(role="system", content="Be brief."),
        common_pb2.Message(role="system", content="Be kind.", name="dev"),
        common_pb2.Message(role="user", content="1+\n1\n?", name="Ada"),
        common_pb2.Message(role="assistant", content="Well.", reasoning_content="Hm."),
        common_pb2.Message(role="tool", content="2\n!", tool_call_id="id of b", name="b"),
        common_pb2.Message(role="tool", tool_call_id="id of a"),
    ]
    for name in "ba":
        wanted[3].tool_calls.add(id=f"id of {name}", name=name, arguments_json=f'{{"{name}": 1}}')
    assert sent == wanted


def test_what_a_turn_leaves_out_or_says_null_is_empty() -> None:
    bare = {"role": "assistant"}
    nulls: dict[str, Any] = dict.fromkeys(
        ("content", "name", "tool_call_id", "tool_calls", "reasoning_content", "reasoning", "annotations")
    )
    for turn in (bare, bare | nulls, bare | {"content": "", "tool_calls": []}, bare | {"content": []}):
        assert wire(turn) == [common_pb2.Message(role="assistant")], turn


def test_thinking_has_two_names() -> None:
    """Where both are there they say the same; an empty one says nothing."""
    for thought in (
        {"reasoning": "Hm."},
        {"reasoning_content": "Hm."},
        {"reasoning_content": "Hm.", "reasoning": "Hm."},
        {"reasoning_content": "", "reasoning": "Hm."},
    ):
        assert wire({"role": "assistant", "content": "x", **thought})[0].reasoning_content == "Hm.", thought


def test_what_restates_is_left_out_of_an_assistants_turn_alone() -> None:
    """turns.py 1: of the turn, of its calls and of their functions."""
    restated = {"parsed": {"a": 1}, "parsed_arguments": {"a": 1}, "provider_specific_fields": {"b": None}}
    call = called("a")
    told = {**call, **restated, "function": {**call["function"], **restated}}
    plain = wire({"role": "assistant", "content": "x", "tool_calls": [call, call]})
    assert wire({"role": "assistant", "content": "x", **restated, "tool_calls": [told, told]}) == plain
    for name in restated:
        for role in ("system", "developer", "user", "tool"):
            error = refusal(USER, {"role": role, "content": "x", name: {}})
            assert (error["param"], error["code"]) == (f"messages[1].{name}", "unsupported_parameter")


@pytest.mark.parametrize(
    ("turn", "param", "code"),
    [
        ({"role": "user", "content": ["x"]}, "content[0]", "invalid_value"),
        ({"role": "user", "content": [part("x"), {"text": "x"}]}, "content[1]", "invalid_value"),
        ({"role": "user", "content": [{"type": 1, "text": "x"}]}, "content[0]", "invalid_value"),
        ({"role": "user", "content": [part("x"), {"type": "image_url"}]}, "content[1].type",
         "unsupported_parameter"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "content[0].type",
         "unsupported_parameter"),
        ({"role": "user", "content": [part("x"), {"type": "text"}]}, "content[1].text", "invalid_value"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "content[0].text", "invalid_value"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "tool_call_id", "invalid_value"),
        ({"role": "assistant", "annotations": [{}]}, "annotations", "invalid_value"),
        ({"role": "assistant", "reasoning": ["x"]}, "reasoning", "invalid_value"),
        ({"role": "assistant", "reasoning_content": 1}, "reasoning_content", "invalid_value"),
        ({"content": "x"}, "role", "invalid_value"),
        # An earlier call that is none.
        ({"role": "assistant", "tool_calls": {}}, "tool_calls", "invalid_value"),
        ({"role": "assistant", "tool_calls": ["a"]}, "tool_calls[0]", "invalid_value"),
        ({"role": "assistant", "tool_calls": [None]}, "tool_calls[0]", "invalid_value"),
        ({"role": "assistant", "tool_calls": [called("a"), {"id": "b"}]}, "tool_calls[1].function",
         "invalid_value"),
        ({"role": "assistant", "tool_calls": [{"id": "b", "function": "f"}]}, "tool_calls[0].function",
         "invalid_value"),
        ({"role": "assistant", "tool_calls": [called("a", type="custom")]}, "tool_calls[0].type",
         "invalid_value"),
        ({"role": "assistant", "tool_calls": [{"id": "b", "function": {"name": "f", "arguments": {}}}]},
         "tool_calls[0].function.arguments", "invalid_value"),
        ({"role": "assistant", "tool_calls": [called("a", mood=1)]}, "tool_calls[0].mood",
         "unsupported_parameter"),
    ],
)  # fmt: skip
def test_what_is_no_turn_is_refused_by_its_place(turn: dict[str, Any], param: str, code: str) -> None:
    error = refusal(USER, turn)
    assert (error["param"], error["code"]) == (f"messages[1].{param}", code), error
    assert error["message"].startswith(error["param"])
