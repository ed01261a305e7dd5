"""The items of a conversation as messages of chat: without a front, as no answer shows them."""

from __future__ import annotations

from typing import Any

import pytest
from quartet_inference.openai.errors import OpenAiError
from quartet_inference.openai.responses.items import carried, messages_of

TEXT: dict[str, Any] = {"type": "output_text", "text": "Well."}
SAID: dict[str, Any] = {"type": "message", "role": "assistant", "content": [TEXT]}
CALLED: dict[str, Any] = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
THOUGHT: dict[str, Any] = {"type": "reasoning", "summary": []}


def part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_a_text_is_what_the_user_says() -> None:
    assert messages_of("hi") == [{"role": "user", "content": "hi"}]
    for role in ("user", "system", "developer"):
        parts = [part("input_text", "1+"), part("input_text", "1?")]
        for item in (
            {"role": role, "content": "1+\n1?"},
            {"type": "message", "role": role, "content": parts},
        ):
            assert messages_of([item]) == [{"role": role, "content": "1+\n1?"}]


@pytest.mark.parametrize(
    "more",
    [
        {"id": "msg_1"},
        {"status": "completed"},
        {"phase": "final_answer"},
        {"parsed": {"a": 1}},
        {"provider_specific_fields": {}},
        {"created_by": None},
    ],
)
def test_what_only_repeats_or_names_an_item_is_left_out(more: dict[str, Any]) -> None:
    """items.py 3"""
    for item in (SAID, CALLED, THOUGHT):
        assert messages_of([{**item, **more}]) == messages_of([item])
    told = {**TEXT, "annotations": [], "logprobs": [], "parsed": {"a": 1}}
    assert messages_of([{**SAID, "content": [told]}]) == [{"role": "assistant", "content": "Well."}]
    assert messages_of([{**CALLED, "parsed_arguments": {}}]) == messages_of([CALLED])


@pytest.mark.parametrize(
    ("fields", "thought"),
    [
        ({"content": [part("reasoning_text", "hm")], "encrypted_content": carried("so"),
          "summary": [part("summary_text", "oh")]}, "hm"),
        ({"encrypted_content": carried("é\n"), "summary": [part("summary_text", "oh")]}, "é\n"),
        ({"encrypted_content": carried("so"), "content": []}, "so"),
        ({"summary": [part("summary_text", "oh "), part("summary_text", "yes")]}, "oh yes"),
        ({"summary": []}, ""),
        # What nobody here can read is not looked at where there is something to read.
        ({"encrypted_content": "gAAA", "content": [part("reasoning_text", "hm")]}, "hm"),
    ],
)  # fmt: skip
def test_thinking_comes_back_as_the_first_that_is_there(fields: dict[str, Any], thought: str) -> None:
    """items.py 2"""
    assert messages_of([{**THOUGHT, **fields}]) == [{"role": "assistant", "reasoning_content": thought}]


def test_a_call_and_its_answer_name_each_other() -> None:
    """items.py 1: neighbouring calls are of one turn; what a tool answers begins no turn of the assistant."""
    answer = {
        "type": "function_call_output",
        "call_id": "a",
        "output": [part("input_text", "2")],
        "name": "add",
    }
    call, result, said = messages_of([CALLED, answer, SAID])
    function = {"name": "add", "arguments": "{}"}
    assert call == {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    assert result == {"role": "tool", "tool_call_id": "a", "content": "2", "name": "add"}
    assert said == {"role": "assistant", "content": "Well."}
    (both,) = messages_of([CALLED, {**CALLED, "call_id": "b"}])
    assert [one["id"] for one in both["tool_calls"]] == ["a", "b"]


def test_nothing_that_was_said_is_lost_where_a_turn_goes_on() -> None:
    """items.py 1"""
    thought = {**THOUGHT, "content": [part("reasoning_text", "hm")]}
    more = {**SAID, "content": "More."}
    whole = {"role": "assistant", "reasoning_content": "hm", "content": "Well."}
    tail = {"role": "assistant", "content": "More."}
    calls = {"tool_calls": messages_of([CALLED])[0]["tool_calls"]}
    assert messages_of([thought, SAID]) == [whole]
    assert messages_of([thought, SAID, more]) == [whole, tail]
    assert messages_of([thought, SAID, CALLED, more]) == [{**whole, **calls}, tail]
    assert messages_of([thought, CALLED, SAID])[1] == {"role": "assistant", "content": "Well."}
    asked = {"role": "user", "content": "hi"}
    assert messages_of([SAID, asked, more]) == [*messages_of([SAID]), asked, tail]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (["x"], "input[1].content[0]"),
        ([TEXT, {"text": "x"}], "input[1].content[1]"),
        ([{"type": ["output_text"], "text": "x"}], "input[1].content[0]"),
        ([{"type": "refusal", "refusal": "No."}], "input[1].content[0].type"),
        ([{"type": "other_text", "text": "x"}], "input[1].content[0].type"),
        ([{"type": "output_text"}], "input[1].content[0].text"),
        ([{**TEXT, "mood": 1}], "input[1].content[0].mood"),
        (None, "input[1].content"),
    ],
)
def test_what_is_no_text_is_refused_by_its_place(content: Any, param: str) -> None:
    with pytest.raises(OpenAiError) as refused:
        messages_of([CALLED, {**SAID, "content": content}])
    assert (refused.value.status, refused.value.body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("text", ["quartet.1.?", "quartet.1.eA", "quartet.1./w=="])
def test_thinking_that_was_torn_on_its_way_is_refused(text: str) -> None:
    """items.py 2"""
    with pytest.raises(OpenAiError, match="is not what was sent from here"):
        messages_of([{**THOUGHT, "encrypted_content": text}])
