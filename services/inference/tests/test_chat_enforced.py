"""The grammar of a turn: what it derives is read back as the calls that it was made for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet_inference.chat import Chat
from quartet_inference.chat.enforced import Calls, TurnForm
from quartet_inference.chat.formats import FORMATS
from quartet_inference.structure.following import StructureError
from quartet_inference.structure.grammar import of_schema

from .following import end_of, follow
from .random_models import CHATML, byte_tokenizer

THINKS = CHATML + "{# <think> </think> #}"
ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": ARGUMENTS}}
    for name in ("f", 'g"}', "g")
]

#: How calls f(a=1), g"}(a=2) are written by each template that has these signs.
SPELLINGS = {
    "hermes": (
        "<tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g\\"}", "arguments": {"a": 2}}\n</tool_call>',
    ),
    "llama3_json": (
        '"parameters": ',
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g\\"}", "parameters": {"a": 2}}',
    ),
    "mistral": (
        "[TOOL_CALLS]",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g\\"}", "arguments": {"a": 2}}]',
    ),
    "mistral of version 13": (
        "[TOOL_CALLS][ARGS]",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"a": 2}',
    ),
    "granite": (
        "<|tool_call|>",
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g\\"}", "arguments": {"a": 2}}]',
    ),
    "phi": (
        "<|tool_call|><|/tool_call|>",
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}},{"name": "g\\"}", "arguments": {"a": 2}}]'
        "<|/tool_call|>",
    ),
    "phi without marks": (
        "functools[",
        'functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g\\"}", "arguments": {"a": 2}}]',
    ),
    "deepseek of version 3": (
        "<｜tool▁calls▁begin｜> ```json",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n'
        '{"a": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "deepseek of version 3.1": (
        "<｜tool▁calls▁begin｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"a": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "kimi": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g:11<|tool_call_argument_begin|>'
        '{"a": 2}<|tool_call_end|><|tool_calls_section_end|>',
    ),
}
#: Where a name stands without quotes.
NAMED = {
    "mistral of version 13": ("f[", "h["),
    "deepseek of version 3": ("｜>f\n", "｜>h\n"),
    "deepseek of version 3.1": ("｜>f<", "｜>h<"),
    "kimi": ("functions.f", "functions.h"),
}
MARKS = [
    *("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "<|tool_call|>", "<think>", "</think>"),
    *FORMATS["deepseek_v3"].special,
    *FORMATS["kimi_k2"].special,
]


def chat_of(folder: Path, template: str, kind: str = "text", **settings: Any) -> Chat:
    """`kind` of the marks: text alone, tokens of text, or special tokens."""
    tokenizer = byte_tokenizer()
    if kind != "text":
        from tokenizers import AddedToken

        special = kind == "special"
        tokenizer.add_tokens([AddedToken(m, special=special, normalized=False) for m in MARKS], special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return Chat(folder, **settings)


def asked(chat: Chat, form: TurnForm, tools: Any = TOOLS, prompt: str = "<|im_start|>assistant\n") -> str:
    grammar = chat.grammar(chat.encode(prompt), tools, form)
    chat.structures.compile(grammar)
    return grammar


def passes(chat: Chat, grammar: str, text: str) -> bool:
    """Whether a turn may be this text, as a whole."""
    return end_of(follow(chat.structures, grammar, chat.encode(text)), chat.end_tokens)


@pytest.mark.parametrize("schema", [{}, {"properties": {"n": {"type": "integer"}}, "required": ["n"]}])
def test_arguments_are_an_object_whatever_the_schema_says(tmp_path: Path, schema: Any) -> None:
    """Anything else is no call that could be read."""
    chat = chat_of(tmp_path, CHATML)
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = asked(chat, TurnForm(calls=Calls(required=True)), tools)
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert passes(chat, grammar, call % '{"n": 1}')
    assert not any(passes(chat, grammar, call % one) for one in ("false", "null", "5", "[]", '"x"'))
    for other in ("string", ["object", "null"]):
        tools[0]["function"]["parameters"] = {"type": other}
        with pytest.raises(QuartetError, match="arguments have names"):
            asked(chat, TurnForm(calls=Calls(required=True)), tools)


@pytest.mark.parametrize("kind", ["text", "tokens", "special"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_what_is_derived_is_read_back(tmp_path: Path, name: str, kind: str) -> None:
    """enforced.py 2, 3; spelling.py 1, 2."""
    signs, text = SPELLINGS[name]
    chat = chat_of(
        tmp_path, CHATML.replace("<tool_call>", "").replace("</tool_call>", "") + f"{{# {signs} #}}", kind
    )
    if name == "mistral of version 13" and kind == "text":
        text = text.replace("] [", "][")
    tools = TOOLS if name not in NAMED else [TOOLS[0], TOOLS[2]]
    if name in NAMED:
        with pytest.raises(QuartetError, match=r"tools\.name"):
            spaced = [{"type": "function", "function": {"name": "f g", "parameters": ARGUMENTS}}]
            asked(chat, TurnForm(calls=Calls(required=True)), spaced)
    required = asked(chat, TurnForm(calls=Calls(required=True)), tools)
    assert passes(chat, required, text)
    reader, _ = chat.reader(chat.encode("x"), tools)
    turn = reader.finish(text)
    second = "g" if name in NAMED else 'g"}'
    assert [(one.name, one.arguments_json) for one in turn.calls] == [("f", '{"a": 1}'), (second, '{"a": 2}')]
    assert turn.content == ""
    for wrong in (
        "", "hello", text + " more", "so: " + text,
        text.replace('"a": 1', '"a": "x"'), text.replace('"a": 1', '"b": 1'),
        text.replace(*NAMED.get(name, ('"f"', '"h"'))),
    ):  # fmt: skip
        assert not passes(chat, required, wrong), wrong
    assert not passes(chat, asked(chat, TurnForm(calls=Calls(required=True, single=True)), tools), text)
    only = asked(chat, TurnForm(calls=Calls(required=True, names=("f",))), tools)
    assert not passes(chat, only, text)
    assert passes(chat, only, re.sub(r'(\]|｜>|functions\.|")g(\\"})?', r"\1f", text))
    strict = asked(chat, TurnForm(calls=Calls(strict=frozenset({"f"}))), tools)
    for right in ("", "hello", text, text.replace('"a": 2', '"b": [2]')):
        assert passes(chat, strict, right), right
    assert not passes(chat, strict, text.replace('"a": 1', '"b": 1'))
    if name != "llama3_json":
        assert passes(chat, strict, "so: " + text)
        assert not passes(chat, strict, "so: " + text.replace('"a": 1', '"b": 1'))
    single = asked(chat, TurnForm(calls=Calls(single=True)), tools)
    assert passes(chat, single, "hello") and not passes(chat, single, text)


@pytest.mark.parametrize("kind", ["text", "tokens", "special"])
def test_thinking_comes_first_and_is_free(tmp_path: Path, kind: str) -> None:
    """enforced.py 1."""
    chat = chat_of(tmp_path, THINKS, kind)
    call = SPELLINGS["hermes"][1].split("\n<tool_call>")[0]
    wild = 'hm {"a": [ \n'
    answer = TurnForm(answer=of_schema(ARGUMENTS))
    opened, closed = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    forms = {
        "answer": (answer, '{"a": 1}', '{"b": 1}'),
        "required": (TurnForm(calls=Calls(required=True)), call, "x" + call),
        "strict": (TurnForm(calls=Calls(strict=frozenset({"f"}))), "so: " + call, call.replace('"a"', '"b"')),
        "single": (TurnForm(calls=Calls(single=True)), "so: " + call, call + call),
    }
    for form, right, wrong in forms.values():
        tools = [] if form is answer else TOOLS
        free = asked(chat, form, tools)
        for thought in ("", f"<think>{wild}</think>", f"<think>\n{wild}\n</think>\n\n"):
            assert passes(chat, free, thought + right), thought
            assert not passes(chat, free, thought + wrong), thought
        if kind != "special":  # else a thought of marks is none of text
            assert passes(chat, free, f"<think>{call.replace('f', 'h')}</think>{right}")
        inside = asked(chat, form, tools, opened)
        assert passes(chat, inside, f"{wild}</think>\n\n{right}")
        assert not passes(chat, inside, wild) and not passes(chat, inside, f"{wild}</think>{wrong}")
        behind = asked(chat, form, tools, closed)
        assert passes(chat, behind, right) and not passes(chat, behind, wrong)
        if form is answer:
            assert not passes(chat, behind, f"<think>{wild}</think>{right}")
    first = asked(chat, TurnForm(answer=of_schema(ARGUMENTS), from_first_token=True), [])
    assert passes(chat, first, '{"a": 1}') and not passes(chat, first, f'<think>{wild}</think>{{"a": 1}}')


def letters_pass(chat: Chat, grammar: str, text: str) -> bool:
    """The same of a text that is written letter by letter, with no token for a mark."""
    letters = [token for letter in text for token in chat.encode(letter)]
    return end_of(follow(chat.structures, grammar, letters), chat.end_tokens)


@pytest.mark.parametrize("kind", ["text", "special"])
def test_no_text_has_a_beginning_of_calls_that_is_not_seen(tmp_path: Path, kind: str) -> None:
    """enforced.py 3: nor the letters of a mark that is a token, which are read as the mark."""
    strict = TurnForm(calls=Calls(strict=frozenset({"f"})))
    call = '{"name": "f", "arguments": {"b": 1}}'
    for name, begun in (
        ("hermes", f"so: <tool_call>{call}</tool_call>"),
        ("llama3_json", f"so: <|python_tag|>{call}"),
        ("granite", f"so: functools[{call}]"),
        ("phi without marks", f"so: <|tool_call|>[{call}]"),
        ("kimi", "so: " + SPELLINGS["kimi"][1].replace('"a"', '"b"')),
    ):
        plain = CHATML.replace("<tool_call>", "").replace("</tool_call>", "")
        chat = chat_of(tmp_path, plain + f"{{# {SPELLINGS[name][0]} #}}", kind)
        tools = [TOOLS[0], TOOLS[2]]
        reader, _ = chat.reader(chat.encode("x"), tools)
        assert reader.finish(begun).calls, "it would be read as a call"
        grammar = asked(chat, strict, tools)
        assert letters_pass(chat, grammar, "so: hello <tool") and not letters_pass(chat, grammar, begun)
    chat = chat_of(tmp_path, THINKS, kind)
    grammar = asked(chat, strict, TOOLS, "<|im_start|>assistant\n<think>\n")
    thought = [token for letter in "hm</think>hm" for token in chat.encode(letter)]
    ended = follow(chat.structures, grammar, [*thought, *chat.encode("</think>hello")])
    assert end_of(ended, chat.end_tokens) is (kind == "text"), "there the first one ends it, and text follows"


@pytest.mark.parametrize("kind", ["text", "tokens", "special"])
@pytest.mark.parametrize("prompt", ["", "<think>\n\n</think>\n\n"])
def test_what_would_be_read_as_thinking_is_no_text(tmp_path: Path, kind: str, prompt: str) -> None:
    """enforced.py 1, 3: calls before it would be lost, and a text behind it may begin as calls do."""
    plain = CHATML.replace("<tool_call>", "").replace("</tool_call>", "")
    tagged = SPELLINGS["hermes"][1].split("\n<tool_call>")[0]
    lines = "<function_calls>\nf(a=1)\n</function_calls>"
    for sign, call, bare in (
        ("<tool_call>", tagged, ""),
        ("<function_calls>", lines, "[f()]"),
        ("[func_name1(", "[f(a=1)]", "[f()]"),
        ('"parameters": ', '{"name": "f", "parameters": {"a": 1}}', '{"name": "f", "parameters": {}}'),
    ):
        chat = chat_of(tmp_path, plain + f"{{# <think> </think> {sign} #}}", kind)
        opened = f"<|im_start|>assistant\n{prompt}"
        grammar = asked(chat, TurnForm(calls=Calls(strict=frozenset({"f"}))), TOOLS[:1], opened)
        assert passes(chat, grammar, "hello") and passes(chat, grammar, call)
        for text in (f"so: {call} x</think>y", f"<think>{call}", f"x</think>{bare}", f"\x1c{bare}"):
            if bare or call in text:
                assert not letters_pass(chat, grammar, text) and not passes(chat, grammar, text), text


@pytest.mark.parametrize("kind", ["text", "special"])
def test_lines_of_calls_are_marked(tmp_path: Path, kind: str) -> None:
    """enforced.py 3: a list of calls without the mark is read as one, too."""
    chat = chat_of(tmp_path, CHATML.replace("tool_call", "") + "{# <function_calls> #}", kind)
    reader, _ = chat.reader(chat.encode("x"), TOOLS[:1])
    assert reader.finish(" [f()]").calls
    for calls in (Calls(strict=frozenset({"f"})), Calls(single=True)):
        grammar = asked(chat, TurnForm(calls=calls), TOOLS[:1])
        assert passes(chat, grammar, "so: [f()]") and not passes(chat, grammar, " [f()]")


def test_an_answer_or_calls(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, CHATML)
    both = asked(chat, TurnForm(answer=of_schema(ARGUMENTS), calls=Calls(single=True)))
    call = SPELLINGS["hermes"][1].split("\n<tool_call>")[0]
    assert passes(chat, both, '{"a": 1}') and passes(chat, both, call)
    assert not passes(chat, both, "hello") and not passes(chat, both, '{"a": 1}' + call)


def test_what_has_no_grammar_is_refused(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, CHATML, tool_parser="none")
    assert not chat.enforces_calls
    for form in (TurnForm(calls=Calls(required=True)), TurnForm(answer=of_schema(ARGUMENTS))):
        with pytest.raises(QuartetError) as refused:
            asked(chat, form)
        assert refused.value.reason == "NOT_IMPLEMENTED" and "(none)" in refused.value.message
    assert passes(chat, asked(chat, TurnForm(answer=of_schema(ARGUMENTS)), []), '{"a": 1}')
    assert chat.grammar([1], TOOLS, TurnForm()) == ""
    hermes = chat_of(tmp_path, CHATML)
    for form, field in (
        (TurnForm(calls=Calls(required=True, names=("h",))), "tool_choice.names"),
        (TurnForm(calls=Calls(strict=frozenset({"f"}))), ""),
    ):
        broken = [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}]
        with pytest.raises((QuartetError, StructureError)) as failed:
            asked(hermes, form, broken)
        if field:
            assert isinstance(failed.value, QuartetError) and failed.value.metadata["field"] == field
    with pytest.raises(QuartetError, match="send tools"):
        asked(hermes, TurnForm(calls=Calls(required=True)), [])
