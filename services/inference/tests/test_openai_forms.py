"""Forms of answers and choices of tools, by the front: a model that knows neither obeys them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from quartet_inference.chat.formats import FORMATS
from quartet_inference.openai.bodies import parse_chat, parse_completion
from quartet_inference.openai.wishes import Wishing

from .openai_door import TOOL, Door, opened

#: Of FORMATS, whose calls no grammar says.
UNENFORCED = {"gemma4"}
COLOUR = {"enum": ["red", "green"]}
ONE: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "c": COLOUR},
    "required": ["a", "c"], "additionalProperties": False,
}  # fmt: skip


def tool(name: str, strict: bool = False, parameters: dict[str, Any] = ONE) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def check(value: dict[str, Any]) -> None:
    assert list(value) == ["a", "c"] and 0 <= value["a"] <= 99 and value["c"] in COLOUR["enum"]


class Answer(pydantic.BaseModel):
    """What is parsed."""

    colour: Literal["red", "green"]
    inner: list[Literal[1, 2]] | None


async def test_a_response_format_is_enforced_strict_or_not(door: Door) -> None:
    forms = [
        {"type": "json_schema", "json_schema": {"name": "one", "schema": ONE, "strict": strict}}
        for strict in (True, False, None)
    ]
    asked = (door.chat(response_format=form, n=3, max_tokens=60) for form in forms)
    for answer in await asyncio.gather(*asked):
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            check(json.loads(choice.message.content))
    bare = await door.complete(extra_body={"response_format": forms[-1]}, max_tokens=60, n=2)
    for choice in bare.choices:
        check(json.loads(choice.text))
    begun = await door.chat(response_format={"type": "json_object"}, max_tokens=3)
    assert begun.choices[0].message.content.startswith("{")


def test_of_chat_thinking_comes_first_and_of_completions_nothing_does() -> None:
    """forms.py 2."""
    asked = {"model": "m", "guided_regex": "a"}
    chat, _ = parse_chat(
        json.dumps({**asked, "messages": [{"role": "user", "content": "x"}]}).encode(), Wishing()
    )
    bare, _ = parse_completion(json.dumps({**asked, "prompt": [1]}).encode(), Wishing())
    requests = [*chat.requests(100), *bare.requests([[1]])]
    assert [one.sampling.structure.from_first_token for one in requests] == [False, True]
    assert {one.sampling.structure.regex for one in requests} == {"a"}


async def test_a_clients_own_parse_gets_what_it_parses(door: Door) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    asked: Any = {"model": door.model, "messages": messages, "max_tokens": 200}
    parse = door.plain.chat.completions.parse
    for answer in await asyncio.gather(*(parse(**asked, response_format=Answer, seed=i) for i in range(4))):
        assert isinstance(answer.choices[0].message.parsed, Answer)
    streamed = door.plain.chat.completions.stream(**asked, response_format=Answer)
    async with streamed as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Answer)
    said = await door.plain.responses.parse(
        model=door.model, input="hi", text_format=Answer, max_output_tokens=200
    )
    assert isinstance(said.output_parsed, Answer)


@pytest.mark.parametrize("older", [False, True])
async def test_forms_by_vllms_names(door: Door, older: bool) -> None:
    forms: dict[str, tuple[Any, str]] = {
        "json": (ONE, r'\{"a": ?[0-9]{1,2}, ?"c": ?"(red|green)"\}'),
        "regex": ("[ab]{3}", "[ab]{3}"),
        "choice": (["yes", 'n"o\\'], r'yes|n"o\\'),
        "grammar": ('start: "x" | "yy"', "x|yy"),
    }
    for name, (value, wanted) in forms.items():
        extra = {f"guided_{name}": value} if older else {"structured_outputs": {name: value}}
        chat, bare = await asyncio.gather(
            door.chat(extra_body=extra, max_tokens=60), door.complete(extra_body=extra, max_tokens=60)
        )
        for answer in (chat.choices[0].message.content, bare.choices[0].text):
            assert re.fullmatch(wanted, answer), (name, answer)
    text = await door.chat(extra_body={"guided_json": json.dumps(ONE)}, max_tokens=60)
    check(json.loads(text.choices[0].message.content))


async def test_a_demanded_call_is_made_and_read_as_ever(door: Door) -> None:
    """enforced.py 2; a later turn begins with the exact tokens."""
    names = set()
    demanded: dict[str, Any] = {"parallel_tool_calls": False, "max_tokens": 150}
    demanded["tools"] = [tool("first"), tool("second")]
    asked = (door.chat(**demanded, tool_choice="required", seed=i, temperature=2.0) for i in range(6))
    for answer in await asyncio.gather(*asked):
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        (call,) = choice.message.tool_calls
        check(json.loads(call.function.arguments))
        names.add(call.function.name)
    assert names == {"first", "second"}
    named: Any = {"type": "function", "function": {"name": "second"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for answer in await asyncio.gather(*(door.chat(**demanded, tool_choice=one) for one in (named, allowed))):
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "second"
        check(json.loads(call.function.arguments))


@pytest.mark.parametrize("parser", sorted(set(FORMATS) - UNENFORCED))
async def test_calls_are_demanded_in_the_models_own_format(model_folder: Path, parser: str) -> None:
    """enforced.py 2, spelling.py 1: of a model that knows none, read by the reader of that format."""
    demanded: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 250}
    async with opened(model_folder, chat={"tool_parser": parser}) as door:
        asked = (door.chat(tools=[tool("first"), tool("second")], seed=seed, **demanded) for seed in range(3))
        for answer in await asyncio.gather(*asked):
            (choice,) = answer.choices
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            (call,) = choice.message.tool_calls
            assert call.function.name in ("first", "second")
            check(json.loads(call.function.arguments))


async def test_streamed_calls_are_enforced_too(door: Door) -> None:
    stream = await door.chat(
        tools=[tool("only")], tool_choice="required", parallel_tool_calls=False, stream=True, max_tokens=150
    )
    chunks = [chunk async for chunk in stream]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in calls] == ["only"]
    check(json.loads(calls[0].function.arguments))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_with_tools_a_form_leaves_the_choice_between_call_and_answer(door: Door) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": ONE}}
    answers = await asyncio.gather(
        *[
            door.chat(tools=[tool("f", strict=True)], response_format=form, parallel_tool_calls=False,
                      seed=seed, max_tokens=150, temperature=3.0)
            for seed in range(12)
        ]
    )  # fmt: skip
    reasons = set()
    for answer in answers:
        (choice,) = answer.choices
        reasons.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            check(json.loads(choice.message.tool_calls[0].function.arguments))
        else:
            check(json.loads(choice.message.content))
    assert reasons == {"tool_calls", "stop"}


async def test_nothing_is_told_unenforced_where_all_is_enforced(model_folder: Path) -> None:
    async with opened(model_folder, openai={"best_effort": True}) as door:
        raw = await door.plain.chat.completions.with_raw_response.create(
            model=door.model,
            messages=[{"role": "user", "content": "x"}],
            tools=[tool("f", strict=True), TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
        )
        assert "X-Quartet-Not-Enforced" not in raw.headers
        assert raw.parse().choices[0].finish_reason in ("tool_calls", "length")
