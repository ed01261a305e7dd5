"""What a model writes that repeats itself, or was told to, costs no more than its length: formats.py 3."""

from __future__ import annotations

import time

import pytest
from quartet_inference.chat.formats import FORMATS, MAX_MISREAD

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
]


@pytest.mark.parametrize(("form", "head", "part"), HOSTILE)
def test_a_text_of_beginnings_is_read_at_once(form: str, head: str, part: str) -> None:
    text = head + part * (CHARS // len(part))
    began = time.process_time()
    assert FORMATS[form].read(text, {}) == (text, [])
    assert time.process_time() - began < SECONDS


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
    """formats.py 4."""
    text = head + part * (10 * CHARS // len(part))
    began = time.process_time()
    assert FORMATS[form].read(text, {})[1]
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("misread", [MAX_MISREAD - 1, MAX_MISREAD])
def test_behind_too_many_that_are_none_no_value_is_json(misread: int) -> None:
    """formats.py 4: but calls are read on."""
    begun = "<parameter=a>[</parameter>"
    text = f'<function=f>{begun * misread}<parameter=b>["</parameter>"]</parameter></function>'
    _, calls = FORMATS["qwen3_coder"].read(text, {})
    assert [one.name for one in calls] == (["f"] if misread < MAX_MISREAD else [])
    _, (call,) = FORMATS["qwen3_coder"].read(f"<function=f>{begun * misread}</function>", {})
    assert call.arguments_json == '{"a": "["}'
