"""Tool calls in the formats that models write, whole and while they are written."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet_inference.chat import FormatReader, ParsedCall, Said
from quartet_inference.chat.formats import FORMATS, format_of
from quartet_inference.chat.reader import THINKING_MARKS, DeclaredReader
from quartet_inference.chat.schemas import schemas_of
from quartet_inference.messages import from_turn

from . import chat_templates as templates
from .declared import DECLARED

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "name": {"type": "string"}, "xs": {"type": "array"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": None}},
]
SCHEMAS = schemas_of(TOOLS)
ONE = ParsedCall("add", '{"a": 1}')
TWO = ParsedCall("now", "{}")

#: Format, text, content, calls.
WRITTEN: list[tuple[str, str, str, list[ParsedCall]]] = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [ONE]),
    ("hermes", 'Hm.\n<tool_call>{"name": "add", "arguments": {"a": 1}}', "Hm.", [ONE]),
    (
        "hermes",
        '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "now"}]</tool_call>',
        "",
        [ONE, TWO],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>',
        "",
        [ParsedCall("add", '{"a": "</tool_call>"}')],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call> done', "done", [TWO]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "",
        [ONE],
    ),
    ("qwen3_coder", "So:\n<function=now>\n</function>", "So:", [TWO]),
    (
        "qwen3_coder",
        "<function=add>\n<parameter=a>\nNaN\n</parameter>\n<parameter=xs>\n[1e999]\n</parameter>\n</function>",
        "",
        [ParsedCall("add", '{"a": "NaN", "xs": [1e999]}')],
    ),
    (
        "qwen3_coder",
        '<function=add>\n<parameter=a>\n"\\ud83d"\n</parameter>\n</function>',
        "",
        [ParsedCall("add", r"""{"a": "\ud83d"}""")],
    ),
    (
        "hermes",
        r"""<tool_call>{"name": "add", "arguments": {"name": "\ud83d"}}</tool_call>""",
        "",
        [ParsedCall("add", r"""{"name": "\ud83d"}""")],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=name>\n12\n</parameter>\n"
        "<parameter=xs>\n[1, 2]\n</parameter>\n"
        "<parameter=other>\nif x:\n  {y}\n</parameter>\n</function>\n</tool_call>",
        "",
        [ParsedCall("add", '{"name": "12", "xs": [1, 2], "other": "if x:\\n  {y}"}')],
    ),
    ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "", [ONE]),
    ("glm45", "Yes.<tool_call>now</tool_call>", "Yes.", [TWO]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
        "",
        [ONE, TWO],
    ),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "add", "id": "abcdefghi"}]', "", [ONE]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]x1[ARGS]{}', "", [ONE, TWO]),
    ("mistral", 'Text.[TOOL_CALLS]add{"a": 1}', "Text.", [ONE]),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [ONE, TWO],
    ),
    (
        "deepseek_v3",
        'Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "Ok.",
        [ONE],
    ),
    (
        "kimi_k2",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        [ONE, TWO],
    ),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [ONE]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        "",
        [ONE, TWO],
    ),
    ("llama3_json", '{"name": "now"}', "", [TWO]),
    ("llama3_json", '\n {"name": "add", "parameters": {"a": 1}}', "", [ONE]),
    ("llama3_json", ' <|python_tag|>\n{"name": "add", "parameters": {"a": 1}}', "", [ONE]),
    ("pythonic", "\n [add(a=1)]", "", [ONE]),
    (
        "qwen3_coder",
        '<function=add>\n<parameter=xs>\n["</parameter>"]\n</parameter>\n<parameter=other>\n'
        '{"a": "</parameter>"}\n</parameter>\n</function>',
        "",
        [ParsedCall("add", '{"xs": ["</parameter>"], "other": {"a": "</parameter>"}}')],
    ),
    (
        "glm45",
        '<tool_call>add\n<arg_key>xs</arg_key>\n<arg_value>["</arg_value>"]</arg_value>\n'
        "<arg_key>a</arg_key>\n<arg_value>1</arg_value></tool_call>",
        "",
        [ParsedCall("add", '{"xs": ["</arg_value>"], "a": 1}')],
    ),
    (
        "mistral",
        '[TOOL_CALLS]add[ARGS]{"name": "[TOOL_CALLS]now[ARGS]{}"}',
        "",
        [ParsedCall("add", '{"name": "[TOOL_CALLS]now[ARGS]{}"}')],
    ),
    ("llama3_json", '{"name": "find", "parameters": {}}', "", [ParsedCall("find", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [ParsedCall("add", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [TWO]),
    ("hermes", ' Hm. <tool_call>{"name": "now", "arguments": {}}</tool_call> So.', " Hm.  So.", [TWO]),
    (
        "pythonic",
        "[add(a=true, xs=[false, null])]",
        "",
        [ParsedCall("add", '{"a": true, "xs": [false, null]}')],
    ),
    ("pythonic", "[add(a=1), now()]", "", [ONE, TWO]),
    ("pythonic", "<|python_start|>[add(a=1)]<|python_end|>", "", [ONE]),
    ("pythonic", "<function_calls>\nadd(a=1)\nnow()\n</function_calls>", "", [ONE, TWO]),
    (
        "pythonic",
        '[calendar.add(name="ü", xs=[1, {"k": None}])]',
        "",
        [ParsedCall("calendar.add", '{"name": "ü", "xs": [1, {"k": null}]}')],
    ),
    ("json_list", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>', "", [ONE]),
    ("json_list", 'functools[{"name": "now", "arguments": {}}]', "", [TWO]),
    ("lfm2", "So. <|tool_call_start|>[add(a=1), now()]<|tool_call_end|>", "So.", [ONE, TWO]),
    (
        "gemma4",
        "<|tool_call>call:add{a:1}<tool_call|><|tool_call>call:now{}<tool_call|><|tool_response>",
        "",
        [ONE, TWO],
    ),
    (
        "gemma4",
        'Hm.<|tool_call>call:add{ a : -1.5e3, b:<|"|>ü} "q"\n<|"|>, c:[true,None,{<|"|>k e<|"|>:{}}, []]}'
        "<tool_call|>",
        "Hm.",
        [ParsedCall("add", '{"a": -1.5e3, "b": "ü} \\"q\\"\\n", "c": [true, null, {"k e": {}}, []]}')],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), WRITTEN)
def test_calls_are_read_as_written(form: str, text: str, content: str, calls: list[ParsedCall]) -> None:
    turn = FormatReader(None, False, FORMATS[form], SCHEMAS).finish(text)
    assert (turn.content, list(turn.calls)) == (content, calls)


#: What is almost a call.
BROKEN: list[tuple[str, str]] = [
    ("qwen3_coder", "<tool_call>\n<function=>\n</function></tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>1</function></tool_call>"),
    ("glm45", "<tool_call></tool_call>"),
    ("glm45", "<tool_call>add <arg_key>a</arg_key></tool_call>"),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}'),
    ("mistral", "[TOOL_CALLS]add[ARGS]{"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{<｜tool▁call▁end｜>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"),
    ("hermes", r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>'),
    ("hermes", r"""<tool_call>{"name": "add", "arguments": "\ud83d"}</tool_call>"""),
    ("pythonic", r"[add(name='\ud83d')]"),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}} and more'),
    ("llama3_json", '{"verdict": "yes"}'),
    ("llama3_json", '{"name": "Ada", "age": 36}'),
    ("llama3_json", '{"name": "add", "parameters": {"a": Infinity}}'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "one"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{} {}"}</tool_call>'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": -Infinity}'),
    ("pythonic", "[add(a=undefined)]"),
    ("llama3_json", "{"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[add(1)]"),
    ("pythonic", "[add(a=open('x'))]"),
    ("pythonic", "[add(**{'a': 1})]"),
    ("pythonic", "[add(a={[]: 1})]"),
    ("pythonic", "[add(a=1e999)]"),
    ("pythonic", "[" + "add(a=" * 500),
    ("pythonic", "[" * 100_000),
    ("pythonic", "[add(a=1, a=2)]"),
    ("lfm2", "<|tool_call_start|>[add(1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[add(a=1)(b=2)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[add(a=1).now()]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[tools['add'](a=1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>['add'(a=1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[(lambda: 1)()]<|tool_call_end|>"),
    ("gemma4", "<|tool_call>call:{}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:1<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:one}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:NaN}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:1 b:2}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{1}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:1,a:2}<tool_call|>"),
    ("gemma4", '<|tool_call>call:add{a:1,<|"|>a<|"|>:2}<tool_call|>'),
    ("gemma4", "<|tool_call>call:add{a:[{b:1,b:2}]}<tool_call|>"),
    ("gemma4", '<|tool_call>call:add{a:<|"|>}<tool_call|>'),
    ("gemma4", '<|tool_call>call:add{<|"|>a<|"|> 1}<tool_call|>'),
    ("gemma4", "<|tool_call>call:add{a:1}, more"),
    ("gemma4", "<|tool_call>call:add{a:" + "[" * 100_000),
    ("json_list", "<|tool_call|>[]]"),
    ("json_list", '<|tool_call|>[{"name": "add", "arguments": [1]}]'),
]


def test_a_thinking_whose_mark_is_a_token_and_a_word() -> None:
    """Gemma 4's."""
    reader = FormatReader(THINKING_MARKS[-1], False, FORMATS["gemma4"], SCHEMAS)
    turn = reader.finish("<|channel>thought\nlet me\n<channel|><|tool_call>call:now{}<tool_call|>")
    assert (turn.reasoning, turn.content, list(turn.calls)) == ("let me", "", [TWO])


@pytest.mark.parametrize(("form", "text"), BROKEN)
def test_what_is_not_a_call_stays_in_the_text(form: str, text: str) -> None:
    turn = FormatReader(None, False, FORMATS[form], SCHEMAS).finish(text)
    assert turn.calls == () and turn.content == text


def streamed(reader: Any, text: str, chance: random.Random) -> tuple[str, str]:
    reasoning = content = ""
    at = 0
    while at < len(text):
        step = chance.randint(1, 9)
        said = reader.feed(text[at : at + step])
        reasoning, content, at = reasoning + said.reasoning, content + said.content, at + step
    return reasoning, content


@pytest.mark.parametrize(("form", "text", "content", "calls"), WRITTEN)
def test_a_stream_never_tells_what_the_whole_does_not_have(
    form: str, text: str, content: str, calls: list[ParsedCall]
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    marked, opened_by_prompt = "<think>\nso\n</think>\n\n", "so\n</think>\n\n"
    for opened, before in ((False, marked), (True, opened_by_prompt), (True, marked), (False, "")):
        reader = FormatReader(("<think>", "</think>"), opened and bool(before), FORMATS[form], SCHEMAS)
        turn = reader.finish(before + text)
        assert (turn.content, list(turn.calls)) == (content, calls)
        reasoning, told = streamed(reader, before + text, chance)
        assert reasoning == turn.reasoning == ("so" if before else "")
        assert turn.content.startswith(told) or not calls


@pytest.mark.parametrize(
    "text", ["a < b", "a <tool", "<thin", "x\n\n", "<think>", "<think>\nhm", "\n\nhi", "{ok}"]
)
def test_a_stream_tells_plain_text_up_to_what_may_become_a_mark(text: str) -> None:
    for form in (FORMATS["hermes"], None):
        reader = FormatReader(("<think>", "</think>"), False, form, SCHEMAS)
        told = "".join(reader.feed(character).content for character in text)
        assert reader.finish(text).content.startswith(told)
        if "<" not in text:
            assert told.strip() == text.strip()


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_text_beside_tools_is_told_as_it_is_written(form: str) -> None:
    """Only what may still become a mark waits, and white space before it: here at most three characters."""
    text = "It is four <5, and so say all [1] of us {2}, <b>the</b>\n\n[ones] and {others}."
    for thinking, before in ((None, ""), (("<think>", "</think>"), ""), (("<think>", "</think>"), "Hm.")):
        reader = FormatReader(thinking, False, FORMATS[form], SCHEMAS)
        if before:
            reasoning = ""
            for at, letter in enumerate(f"<think>\n{before}", 1):
                reasoning += reader.feed(letter).reasoning
                assert reasoning == before[: max(0, at - len("<think>\n"))]
            assert reader.feed("</think>\n\n") == Said("", "")
        told = ""
        for at, letter in enumerate(text, 1):
            told += reader.feed(letter).content
            assert text[:at].startswith(told) and len(told) >= at - 3, (told, text[:at])
        assert told == text


def test_text_that_ends_inside_the_thinking_is_thinking() -> None:
    reader = FormatReader(("<think>", "</think>"), False, FORMATS["hermes"], SCHEMAS)
    turn = reader.finish('<think>\nI could <tool_call>{"name": "add"}</tool_call>')
    assert turn.content == "" and turn.calls == () and turn.reasoning.startswith("I could <tool_call>")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (templates.QWEN3, "hermes"),
        (templates.HERMES, "hermes"),
        (templates.LLAMA3, "llama3_json"),
        (templates.MISTRAL, "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<tool_call>\\n<function=example><parameter=x>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>", "glm45"),
        ("'<｜tool▁calls▁begin｜>'", "deepseek_v3"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("", "hermes"),
    ],
)
def test_the_template_gives_the_format_away(template: str, name: str) -> None:
    assert format_of(template).name == (name if template != templates.MISTRAL else "mistral")


MARKS = sorted({mark for form in FORMATS.values() for mark in (*form.markers, *form.special)})
FRAGMENTS = [
    *MARKS, '{"name": "add", "arguments": {"a": 1}}', '{"name": ', "}", "[", "]", "(", "a=1", "add", "\n",
    r"\ud83d", r'"\ud83d"',
    " ", "<parameter=a>", "</parameter>", "</function>", "```json\n", "```", "é", "text", '"', "<think>",
    "</think>",
]  # fmt: skip


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.booleans())
def test_no_text_is_a_fault_and_nothing_told_is_taken_back(name: str, parts: list[str], opened: bool) -> None:
    text = "".join(parts)
    for thinking in (None, ("<think>", "</think>")):
        reader = FormatReader(thinking, opened and thinking is not None, FORMATS[name], SCHEMAS)
        turn = reader.finish(text)
        assert from_turn(turn).ByteSize()
        said = [reader.feed(part) for part in parts]
        reasoning = "".join(one.reasoning for one in said)
        content = "".join(one.content for one in said)
        if (
            thinking is not None
            and not opened
            and not text.lstrip().startswith("<think>")
            and "</think>" in text
        ):
            continue  # the mark's missing half was known only later
        assert turn.reasoning.startswith(reasoning)
        assert turn.content.startswith(content)


def test_a_declared_response_template_is_followed() -> None:
    """What a tokenizer brings along is read by transformers' own parser."""
    prompt = "user text<|im_start|>assistant\n"
    text = '<think>hm</think>Sure.<call>{"name": "add", "arguments": {"a": 1}}</call>'
    reader = DeclaredReader(DECLARED, prompt, TOOLS)
    turn = reader.finish(text)
    assert (turn.reasoning, turn.content) == ("hm", "Sure.")
    assert [(c.name, json.loads(c.arguments_json)) for c in turn.calls] == [("add", {"a": 1})]
    assert streamed(reader, text, random.Random(0)) == ("hm", "Sure.")
    broken = '<call>{"name": </call>'
    assert streamed(DeclaredReader(DECLARED, prompt, TOOLS), broken + "more", random.Random(0))[1] == ""
    assert DeclaredReader(DECLARED, prompt, TOOLS).finish(broken).content == broken
    assert DeclaredReader(DECLARED, prompt + "<think>", TOOLS).finish("hm</think>Yes").reasoning == "hm"


def test_a_declared_thinking_may_be_called_so() -> None:
    """Some response templates name the field as the others name the marks."""
    fields = dict(DECLARED["fields"])
    fields["thinking"] = fields.pop("reasoning_content")
    reader = DeclaredReader({**DECLARED, "fields": fields}, "user text<|im_start|>assistant\n", TOOLS)
    text = '<think>hm</think>Sure.<call>{"name": "add", "arguments": {"a": 1}}</call>'
    turn = reader.finish(text)
    assert (turn.reasoning, turn.content, turn.calls) == ("hm", "Sure.", (ONE,))
    assert streamed(reader, text, random.Random(0)) == ("hm", "Sure.")


def test_a_parameter_is_what_its_definition_says_whatever_definitions_are_called() -> None:
    """schemas.py 1"""
    for group in ("$defs", "definitions"):
        parameters = {
            "type": "object",
            "properties": {"a": {"$ref": f"#/{group}/word"}, "b": {"$ref": f"#/{group}/number"}},
            group: {"word": {"type": "string"}, "number": {"type": "integer"}},
        }
        tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
        text = "<tool_call>add" + "".join(
            f"<arg_key>{key}</arg_key><arg_value>12</arg_value>" for key in "ab"
        )
        reader = FormatReader(None, False, FORMATS["glm45"], schemas_of([tool]))
        assert reader.finish(text + "</tool_call>").calls == (ParsedCall("add", '{"a": "12", "b": 12}'),)


#: What stands between the marks of a call, and the arguments of the call that it is; None: it is none.
DECLARED_CALLS: list[tuple[str, str | None]] = [
    ("[1]", None),
    ("5", None),
    ("null", None),
    ('"add"', None),
    ("{}", None),
    ('[{"name": "add", "arguments": {}}]', None),
    ('{"name": 3, "arguments": {}}', None),
    ('{"name": null, "arguments": {}}', None),
    ('{"name": "", "arguments": {}}', None),
    ('{"name": "add", "arguments": [1]}', None),
    ('{"name": "add", "arguments": 1}', None),
    ('{"name": "add", "arguments": "x"}', None),
    ('{"name": "add", "arguments": "{} {}"}', None),
    ('{"name": "add", "arguments": {"a": NaN}}', None),
    ('{"name": "add", "arguments": -Infinity}', None),
    (r'{"name": "add", "arguments": {"name": "\ud83d"}}', None),
    ('{"name": "add", "arguments": ' + '{"a":' * 5_000 + "1" + "}" * 5_000 + "}", None),
    ('{"name": "add", "arguments": null}', "{}"),
    ('{"name": "add", "arguments": ""}', "{}"),
    ('{"name": "add"}', "{}"),
    (r'{"name": "add", "arguments": "{\"a\":  1}"}', '{"a":  1}'),
    ('{"name": "add", "parameters": {"name": "é"}}', '{"name": "é"}'),
]


@pytest.mark.parametrize(("inside", "arguments"), DECLARED_CALLS, ids=[x[0][:40] for x in DECLARED_CALLS])
def test_a_declared_call_is_one_by_the_rules_of_the_others(inside: str, arguments: str | None) -> None:
    """reader.py 3; calls.py 3."""
    text = f"Sure.<call>{inside}</call>"
    reader = DeclaredReader(DECLARED, "user text<|im_start|>assistant\n", TOOLS)
    turn = reader.finish(text)
    if arguments is None:
        assert (turn.content, turn.calls) == (text, ())
    else:
        assert (turn.content, turn.calls) == ("Sure.", (ParsedCall("add", arguments),))
    assert streamed(reader, text, random.Random(0)) == ("", "Sure.")
