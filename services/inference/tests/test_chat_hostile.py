"""What repeats itself costs no more than its length: a text (tool_format.py 3), and a tool's schema."""

from __future__ import annotations

import time
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet_inference.chat.enforced import Calls, Thinking, Thought, TurnForm, turn_grammar
from quartet_inference.chat.formats import FORMATS
from quartet_inference.chat.reader import PARSED_CHARS, DeclaredReader
from quartet_inference.chat.spelling import spelling_of
from quartet_inference.chat.tool_format import MAX_MISREAD
from quartet_inference.structure.grammar import MAX_STRUCTURE_CHARS, quoted

from .declared import DECLARED

#: Of a long answer.
CHARS = 100_000
#: Read in tens of milliseconds; in time that grows with the square of the length, half a minute and more.
SECONDS = 5.0

HOSTILE = [
    ("glm45", "<tool_call>f", "<arg_key>a</arg_key><arg_value>"),
    ("glm45", "", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
    ("qwen3_coder", "", "<tool_call><function=f><parameter=a>"),
    ("pythonic", "", "<function_calls>[f(a=1)"),
    ("pythonic", "", "<|python_start|>"),
    ("hermes", "", '<tool_call>{"name": "f", "arguments": {'),
    ("llama3_json", "", "<|python_tag|>"),
    ("lfm2", "", "<|tool_call_start|>[f(a=1)"),
    ("gemma4", "", "<|tool_call>call:f{a:["),
    ("gemma4", "<|tool_call>call:f{", "a:1, "),
]


@pytest.mark.parametrize(("form", "head", "part"), HOSTILE)
def test_a_text_of_beginnings_is_read_at_once(form: str, head: str, part: str) -> None:
    text = head + part * (CHARS // len(part))
    began = time.process_time()
    assert FORMATS[form].read(text, {}) == (text, [])
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("part", ["some words\n", "<", "<cal", "<call>{}</call>", "<think>"])
def test_a_text_is_read_at_once_by_a_declared_template(part: str) -> None:
    """Also one that nobody reads while it is written."""
    text = part * (2 * CHARS // len(part))
    began = time.process_time()
    DeclaredReader(DECLARED, "hi<|im_start|>assistant\n", []).finish(text)
    assert time.process_time() - began < 1.0  # given at once, 3 to 18 s


def test_a_declared_turn_is_one_whatever_it_is_given_in() -> None:
    """Marks and calls lie across the ends of what the parser is given at once."""
    call = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
    for before in range(PARSED_CHARS - len(call) - 10, PARSED_CHARS + 1):
        thought = "x" * (before - len("<think></think>"))
        turn = DeclaredReader(DECLARED, "hi<|im_start|>assistant\n", []).finish(
            f"<think>{thought}</think>So.{call}"
        )
        assert (turn.reasoning, turn.content, len(turn.calls)) == (thought, "So.", 1)


@pytest.mark.parametrize("misread", [MAX_MISREAD - 1, MAX_MISREAD])
def test_a_call_behind_too_many_that_are_none_stays_in_the_text(misread: int) -> None:
    text = "<tool_call>no" * misread + '<tool_call>{"name": "now"}</tool_call>'
    _, calls = FORMATS["hermes"].read(text, {})
    assert len(calls) == (misread < MAX_MISREAD)


@pytest.mark.parametrize(
    ("form", "head", "part"),
    [
        ("qwen3_coder", "<function=f>", '<parameter=a>["</parameter><parameter=a>",</parameter>'),
        ("qwen3_coder", "", '<function=f><parameter=a>[["</parameter></function>'),
        ("glm45", "<tool_call>f", '<arg_key>a</arg_key><arg_value>{"</arg_value>'),
        ("glm45", "", '<tool_call>f<arg_key>a</arg_key><arg_value>["</arg_value></tool_call>",'),
    ],
)
def test_values_that_begin_like_json_and_are_none_are_read_at_once(form: str, head: str, part: str) -> None:
    """tool_format.py 4."""
    text = head + part * (10 * CHARS // len(part))
    began = time.process_time()
    assert FORMATS[form].read(text, {})[1]
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("misread", [MAX_MISREAD - 1, MAX_MISREAD])
def test_behind_too_many_that_are_none_no_value_is_json(misread: int) -> None:
    """tool_format.py 4: but calls are read on."""
    begun = "<parameter=a>[</parameter>"
    text = f'<function=f>{begun * misread}<parameter=b>["</parameter>"]</parameter></function>'
    _, calls = FORMATS["qwen3_coder"].read(text, {})
    assert [one.name for one in calls] == (["f"] if misread < MAX_MISREAD else [])
    _, (call,) = FORMATS["qwen3_coder"].read(f"<function=f>{begun * misread}</function>", {})
    assert call.arguments_json == '{"a": "["}'


def required(form: str, parameters: dict[str, Any]) -> str:
    """The grammar of a call of a tool with these."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    turn, spelling = TurnForm(calls=Calls(required=True)), spelling_of(form, "")
    return turn_grammar(turn, tools, spelling, Thinking(Thought.NONE), quoted)


@pytest.mark.parametrize("around", [
    lambda inner: {"type": "array", "items": inner},
    lambda inner: {"type": ["array", "array"], "items": inner},
    lambda inner: {"type": "object", "additionalProperties": inner},
    lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]},
])  # fmt: skip
def test_what_is_nested_is_not_written_twice(around: Any) -> None:
    """At twice the length for each level it would be more than any machine holds."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(100):
        schema = around(schema)
    assert len(required("pythonic", {"properties": {"a": schema}})) < 40_000


@pytest.mark.parametrize("form", ["glm45", "qwen3_coder"])
def test_definitions_are_not_copied_for_each_parameter_before_they_are_found_too_long(form: str) -> None:
    definitions: dict[str, Any] = {f"d{number}": {"type": "integer"} for number in range(50_000)}
    for one, refuses in ({"type": "integer"}, False), ({"items": {"$ref": "#/$defs/d0"}}, True):
        parameters = {"properties": {f"p{number}": one for number in range(100)}, "$defs": definitions}
        began = time.process_time()
        try:
            said = required(form, parameters)
        except QuartetError as refused:
            assert refuses and f"at most {MAX_STRUCTURE_CHARS}" in refused.message
        else:
            assert not refuses and "d0" not in said, "no parameter refers to them"
        assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("form", ["glm45", "pythonic"])
def test_many_parameters_are_found_too_many_at_once(form: str) -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(40_000)}
    began = time.process_time()
    with pytest.raises(QuartetError, match=f"at most {MAX_STRUCTURE_CHARS}"):
        required(form, {"properties": properties, "required": list(properties)})
    assert time.process_time() - began < SECONDS
