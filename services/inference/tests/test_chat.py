"""Chat template, exact continuation and tool calls."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet_inference.chat import Chat, FormatReader, ParsedCall, Turn
from quartet_inference.chat.formats import FORMATS
from quartet_inference.messages import from_turn

from .random_models import CHATML

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


def test_a_turn_that_a_stop_token_has_closed_is_not_closed_again(model_folder: Path, tmp_path: Path) -> None:
    """As of base models, whose end of text is another token than the end of a turn."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    (folder / "generation_config.json").unlink()
    base = Chat(folder)
    assert END not in base.end_tokens
    given = [*base.render([user("hi")], []), 104, END]
    extended = base.extend(given, [user("go on")], [])
    assert extended[: len(given)] == given
    follows = "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert base.text(extended[len(given) :], special=True) == follows


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


@pytest.mark.parametrize(
    ("begin", "end"),
    [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")],
)
def test_thinking_is_read_by_the_marks_that_the_template_knows(
    model_folder: Path, tmp_path: Path, begin: str, end: str
) -> None:
    """As models write them, letter by letter: Qwen3 and many others, Mistral, Seed."""
    template = tmp_path / "chat.jinja"
    template.write_text(CHATML + f"{{# {begin} {end} #}}")
    chat = Chat(model_folder, template_file=template)
    prompt = chat.render([user("hi")], [])
    for opening, text in (("", f"{begin}\nHm.\n{end}\n\nWell."), (f"{begin}\n", f"Hm.\n{end}\n\nWell.")):
        reader, _ = chat.reader(prompt + chat.encode(opening), [])
        turn = reader.finish(text)
        assert (turn.reasoning, turn.content) == ("Hm.", "Well.")
        said = [reader.feed(letter) for letter in text]
        assert ("".join(one.reasoning for one in said), "".join(one.content for one in said)) == (
            "Hm.",
            "Well.",
        )


def test_behind_a_thinking_that_the_prompt_has_closed_its_end_is_text() -> None:
    text = "The </think> tag ends it."
    reader = FormatReader(("<think>", "</think>"), False, None, {}, closed=True)
    turn = reader.finish(text)
    assert (turn.reasoning, turn.content) == ("", text)
    assert "".join(reader.feed(letter).content for letter in text) == text
    again = reader.finish("<think>\nhm\n</think>\n\nyes")
    assert (again.reasoning, again.content) == ("hm", "yes")


def test_words_of_python_are_values_where_the_schema_knows_no_text() -> None:
    """As the template of Qwen3-Coder prints them in earlier calls."""
    kinds: dict[str, Any] = {
        "flag": {"type": "boolean"},
        "may": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "word": {"type": "string"},
        "either": {"type": ["string", "boolean"]},
        "count": {"type": "integer"},
    }
    written = {"flag": "False", "may": "None", "word": "True", "either": "True", "count": "None"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    (call,) = (
        FormatReader(None, False, FORMATS["qwen3_coder"], {"f": kinds})
        .finish(f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>")
        .calls
    )
    assert json.loads(call.arguments_json) == {
        "flag": False, "may": None, "word": "True", "either": "True", "count": "None"
    }  # fmt: skip


def test_a_call_without_an_id_gets_one_without_asking_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(_: int) -> bytes:
        raise AssertionError("the event loop would wait for the interpreter")

    monkeypatch.setattr(os, "urandom", asked)
    [named] = from_turn(Turn("", "", (ParsedCall("f", "{}"),))).tool_calls
    assert re.fullmatch("[0-9a-f]{9}", named.id)


def test_calls_keep_the_ids_that_the_model_wrote() -> None:
    """By which it knows their answers again: Kimi's template prints an earlier call by its id alone."""

    def ids(form: str, text: str) -> list[str]:
        return [
            call.id
            for call in from_turn(FormatReader(None, False, FORMATS[form], {}).finish(text)).tool_calls
        ]

    def kimi(*ids: str) -> str:
        calls = (f"<|tool_call_begin|>{one}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for one in ids)
        return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"

    assert ids("kimi_k2", kimi("functions.add:3", "functions.now:4")) == [
        "functions.add:3",
        "functions.now:4",
    ]
    assert ids("mistral", '[TOOL_CALLS]add[CALL_ID]Ab3dEf9hi[ARGS]{"a": 1}') == ["Ab3dEf9hi"]
    # Of two calls, of any call of a tool, and of a form that Mistral's own template refuses.
    for fresh in (
        ids("kimi_k2", kimi("functions.now:0", "functions.now:0")),
        ids("kimi_k2", kimi("functions.now")),
        ids("mistral", '[TOOL_CALLS]add[CALL_ID]7[ARGS]{"a": 1}'),
    ):
        assert all(len(one) == 9 and one.isalnum() for one in fresh) and len(set(fresh)) == len(fresh) > 0
