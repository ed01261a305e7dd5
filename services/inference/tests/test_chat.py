"""Chat template, exact continuation and tool calls."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet_inference.chat import Chat, ParsedCall, Turn

END, NEWLINE = 258, 198


@pytest.fixture(scope="module")
def chat(model_folder: Path) -> Chat:
    return Chat(model_folder)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def read(chat: Chat, text: str, with_tools: bool = True) -> Turn:
    """The turn of a text that was sampled after an ordinary prompt."""
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    reader, _ = chat.reader(chat.render([user("hi")], []), [tool] if with_tools else [])
    return reader.finish(text)


def test_render_is_the_template(chat: Chat) -> None:
    ids = chat.render([user("hi")], [])
    assert chat.text(ids, special=True) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.end_tokens == {END}


def test_a_torn_file_of_end_tokens_is_refused_by_name(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    os.truncate(folder / "generation_config.json", 20)
    with pytest.raises(ConfigError, match=r"cannot be served: .*generation_config\.json"):
        Chat(folder)


def test_extend_keeps_the_given_tokens_and_closes_the_turn_once(chat: Chat) -> None:
    prompt = chat.render([user("hi")], [])
    tail = [{"role": "tool", "content": "42"}, user("go on")]
    follows = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    for sampled, close in (([104, 105, END], ""), ([104, 105], "<|im_end|>"), ([0xE2, END], "")):
        given = prompt + sampled
        extended = chat.extend(given, tail, [])
        assert extended[: len(given)] == given
        assert chat.text(extended[len(given) :], special=True) == close + follows
    # What a template would have rendered from the start, were the sampled text its own encoding.
    whole = chat.render([user("hi"), {"role": "assistant", "content": "ok"}, user("x")], [])
    sampled = chat.render([user("hi"), {"role": "assistant", "content": "ok"}], [])
    cut = sampled[: sampled.index(END, len(prompt)) + 1]
    assert chat.extend(cut, [user("x")], []) == whole


def test_tool_calls_are_parsed_as_written(chat: Chat) -> None:
    text = (
        'Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": [2.50]}}\n</tool_call>'
        '<tool_call>{"arguments": "{\\"q\\": 1}", "name": "find"}</tool_call>'
        '<tool_call>{"name": "noargs"}</tool_call>'
    )
    turn = read(chat, text)
    assert turn.content == "Let me see."
    assert turn.calls == (
        ParsedCall("add", '{"a": 1,  "b": [2.50]}'),
        ParsedCall("find", '{"q": 1}'),
        ParsedCall("noargs", "{}"),
    )
    assert read(chat, text, with_tools=False).content == text


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        "<tool_call>add(1)</tool_call>",
        '<tool_call>{"name": "add"',
        "<tool_call>{}</tool_call>",
        '<tool_call>{"a":' + "[" * 20000 + "}</tool_call>",
    ],
)
def test_unreadable_calls_stay_in_the_text(chat: Chat, broken: str) -> None:
    turn = read(chat, broken)
    assert (turn.content, turn.calls) == (broken, ())


def test_nested_braces_and_tags_in_strings(chat: Chat) -> None:
    arguments = json.dumps({"code": "if x: {y: {1}} }"})
    turn = read(chat, f'<tool_call>{{"name": "python", "arguments": {arguments}}}</tool_call>')
    assert turn.calls == (ParsedCall("python", arguments),)


def test_template_errors_are_typed(chat: Chat) -> None:
    with pytest.raises(QuartetError) as refusal:
        chat.render([{"content": "no role"}], [])
    assert refusal.value.reason == "INVALID_REQUEST"
