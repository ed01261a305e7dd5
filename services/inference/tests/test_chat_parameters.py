"""Calls whose arguments are parameters: what their grammar derives is read back as what the schema allows."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quartet.errors import QuartetError
from quartet_inference.chat import Chat, ParsedCall
from quartet_inference.chat.enforced import Calls, Thinking, Thought, TurnForm, turn_grammar
from quartet_inference.chat.formats import FORMATS
from quartet_inference.chat.schemas import schemas_of
from quartet_inference.chat.spelling import spelling_of
from quartet_inference.structure.grammar import quoted

from .following import allowed, end_of, follow
from .random_models import CHATML, byte_tokenizer
from .test_chat_enforced import asked, passes

SIGNS = {
    "qwen3_coder": "<tool_call>\n<function=f><parameter=x>",
    "glm45": "<tool_call>f<arg_key>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "pythonic": "[func_name1(",
    "pythonic of Olmo": "<function_calls>",
    "lfm2": "<|tool_call_start|>",
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "free"},
        "kind": {"$ref": "#/$defs/kind"},
        "code": {"type": "string", "minLength": 2, "maxLength": 4},
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "x": {"type": "number"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "id": {"type": ["integer", "string", "boolean"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "at": {"$ref": "#/$defs/point"},
        "any": {},
    },
    "required": ["path", "kind", "n", "tags"],
    "additionalProperties": False,
    "$defs": {
        "kind": {"enum": ["cat", "catty", "3"], "type": "string"},
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/point"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
    for name, parameters in (("f", PARAMETERS), ("fg", {"type": "object", "properties": {}}))
]
#: So that a random text ends, and contains what might end it.
WORDS = [
    *(
        "\n</parameter>",
        "</parameter>",
        "</arg_value>",
        "</function>",
        '"',
        "'",
        "null",
        "true",
        "12",
        "[",
        "]",
    ),
    *("<|python_end|>", ")]", "})", ", ", "None", "\\"),
]
ENDS = {"qwen3_coder": "\n</parameter>", "glm45": "</arg_value>"}


def chat_of(folder: Path, name: str, special: bool) -> Chat:
    from tokenizers import AddedToken

    tokenizer = byte_tokenizer()
    form = FORMATS[name.split()[0]]
    marks = [AddedToken(mark, special=special, normalized=False) for mark in form.special]
    words = [AddedToken(word, special=False, normalized=False) for word in WORDS]
    tokenizer.add_tokens(words)
    tokenizer.add_tokens(marks, special)
    plain = CHATML.replace("<tool_call>", "").replace("</tool_call>", "")
    tokenizer.chat_template = plain + f"{{# {SIGNS[name]} #}}"
    tokenizer.save_pretrained(folder)
    chat = Chat(folder)
    assert chat.tool_parser == form.name and chat.enforces_calls
    return chat


def written(name: str, function: str = "f", **values: str) -> str:
    """A call as the format's template writes it."""
    if name == "glm45":
        parts = [f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()]
        return f"<tool_call>{function}\n{''.join(parts)}</tool_call>"
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<tool_call>\n<function={function}>\n{''.join(parts)}</function>\n</tool_call>"


def read(chat: Chat, text: str) -> tuple[str, list[ParsedCall]]:
    reader, _ = chat.reader(chat.encode("x"), TOOLS)
    turn = reader.finish(text)
    return turn.content, list(turn.calls)


LEAST = {"path": "a b", "kind": "cat", "n": "3", "tags": "[]"}
#: Value of a parameter, and what is read of it; None: it is not allowed.
VALUES: list[tuple[str, str, Any]] = [
    ("path", "", ""),
    ("path", ' "1"\n\n{ </', ' "1"\n\n{ </'),
    ("path", "12", "12"),
    ("path", "x{end}y", None),
    ("kind", "catty", "catty"),
    ("kind", "3", "3"),
    ("kind", "dog", None),
    ("kind", '"cat"', None),
    ("code", "日本", "日本"),
    ("code", "a", None),
    ("code", "abcde", None),
    ("n", "7", 7),
    ("n", "12", None),
    ("n", '"7"', None),
    ("x", "1e999", float("inf")),
    ("note", "nothing", "nothing"),
    ("note", "nullable", "nullable"),
    ("note", "null", None),
    ("note", '"12{end}"', "12{end}"),
    ("id", "12", 12),
    ("id", "a12", "a12"),
    ("id", "true", True),
    ("id", '"true"', "true"),
    ("id", "1.5", None),
    ("id", "null", None),
    ("id", "[1]", None),
    ("tags", '["{end}", "\\n"]', ["{end}", "\n"]),
    ("tags", '["a", "b", "c"]', None),
    ("tags", "a", None),
    ("at", '{"x": 1, "next": {"x": 2}}', {"x": 1, "next": {"x": 2}}),
    ("at", '{"x": 1, "next": {"y": 2}}', None),
    ("any", "hello", "hello"),
    ("any", "[1, {}]", [1, {}]),
    ("any", "12", 12),
    ("any", '"{end}"', "{end}"),
    ("any", "[1, ", None),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_values_are_what_the_schema_says_and_are_read_so(tmp_path: Path, name: str, special: bool) -> None:
    """parameters.py 1, 2; schemas.py 1, 2; tool_format.py 4."""
    chat = chat_of(tmp_path, name, special)
    required = asked(chat, TurnForm(calls=Calls(required=True, names=("f",))), TOOLS)
    end = ENDS[name].strip()
    for key, value, wanted in VALUES:
        if special and name == "glm45" and "{end}" in value and wanted is not None:
            continue  # a special token is no text
        values = {**LEAST, key: value.replace("{end}", end)}
        text = written(name, **{k: values[k] for k in PARAMETERS["properties"] if k in values})
        null = (key, value) == ("note", "null")
        assert passes(chat, required, text) is (wanted is not None or null), (key, value)
        if wanted is not None or null:
            content, (call,) = read(chat, text)
            arguments = json.loads(call.arguments_json)
            wanted = wanted.replace("{end}", end) if isinstance(wanted, str) else wanted
            wanted = [one.replace("{end}", end) for one in wanted] if key == "tags" else wanted
            assert (content, call.name, arguments[key]) == ("", "f", wanted), (key, value)
    for wrong in (
        written(name, **{key: value for key, value in LEAST.items() if key != "kind"}),
        written(name, **dict(reversed(LEAST.items()))), written(name, **LEAST, more="1"),
        written(name, **LEAST).replace("</tool_call>", ""), written(name, "g", **LEAST),
        "so: " + written(name, **LEAST),
    ):  # fmt: skip
        assert not passes(chat, required, wrong), wrong


def test_no_text_has_the_letters_of_the_mark_that_ends_it(tmp_path: Path) -> None:
    """parameters.py 2: where the mark is a token they would be read as the mark."""
    chat = chat_of(tmp_path, "glm45", special=True)
    required = asked(chat, TurnForm(calls=Calls(required=True, names=("f",))), TOOLS)
    before, after = written("glm45", **{**LEAST, "path": "a@b"}).split("@")
    for text, wanted in (("</arg_valu", True), ("</arg_value>", False)):
        letters = [token for letter in text for token in chat.encode(letter)]
        tokens = [*chat.encode(before), *letters, *chat.encode(after)]
        assert end_of(follow(chat.structures, required, tokens), chat.end_tokens) is wanted


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_calls_in_texts_are_enforced_where_they_are_read(tmp_path: Path, name: str, special: bool) -> None:
    """enforced.py 2, 3: of a tool that is not strict there may be any parameters."""
    chat = chat_of(tmp_path, name, special)
    good, free = written(name, **LEAST), written(name, "fg", a="1", **{"b c": "[x"})
    strict = asked(chat, TurnForm(calls=Calls(strict=frozenset({"f"}))), TOOLS)
    for text in (
        "",
        "hello <",
        good,
        f"so: {good}\n{good}",
        written(name, "fg", a="1", b="x"),
        good + " end",
    ):
        assert passes(chat, strict, text), text
    assert not passes(chat, strict, free), "it begins like JSON and is none"
    for text in (good.replace("cat", "dog"), f"so: {good.replace('cat', 'dog')}", good + written(name, "h")):
        assert not passes(chat, strict, text), text
    single = asked(chat, TurnForm(calls=Calls(single=True)), TOOLS)
    assert passes(chat, single, "so: " + good) and not passes(chat, single, good + good)
    if name == "qwen3_coder":  # a call that is not opened is read as well
        bare = good.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        assert passes(chat, strict, "so: " + bare) and len(read(chat, "so: " + bare)[1]) == 1
        assert passes(chat, strict, f"{bare}\n{good}") and len(read(chat, f"{bare}\n{good}")[1]) == 2
        assert not passes(chat, strict, "so: " + bare.replace("cat", "dog"))
        assert not passes(chat, single, bare + bare)


def sampled(chat: Chat, grammar: str, rng: random.Random) -> str | None:
    """A text of random tokens that are allowed, rather of those that are more than a byte; None: too long."""
    follower, tokens = chat.structures.follower(grammar), []
    for _ in range(600):
        may = sorted(allowed(follower))
        if not may:
            raise AssertionError(f"stuck behind {chat.text(tokens, special=True)!r}")
        long = [token for token in may if token > 255]
        printable = [token for token in may if 0 <= token < 94] or may
        token = rng.choice(long if long and rng.random() < 0.4 else printable if rng.random() < 0.9 else may)
        if token in chat.end_tokens:
            return chat.text(tokens, special=True)
        tokens.append(token)
        follower.accept(token)
    return None


#: Texts that are sampled: by chance few of them are a call of the tool that is strict.
AT_LEAST, AT_MOST = 30, 400


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", SIGNS)
def test_random_calls_are_read_as_arguments_that_follow_their_schemas(
    tmp_path: Path, name: str, special: bool
) -> None:
    """parameters.py 1; pythonic.py 1; spelling.py 1; enforced.py 3: by a model that knows nothing."""
    jsonschema = pytest.importorskip("jsonschema")
    chat = chat_of(tmp_path, name, special)
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for calls in (Calls(required=True), Calls(strict=frozenset({"f"}))):
        grammar, found = asked(chat, TurnForm(calls=calls), TOOLS), 0
        for attempt in range(AT_MOST):
            if attempt >= AT_LEAST and (found > 3 or not calls.required):
                break
            text = sampled(chat, grammar, rng)
            if text is None:
                continue
            content, read_calls = read(chat, text)
            assert (content == "" and read_calls) or not calls.required, text
            for call in read_calls:
                arguments = json.loads(call.arguments_json)
                assert isinstance(arguments, dict) and call.name in ("f", "fg")
                if call.name == "f":
                    jsonschema.validate(arguments, PARAMETERS)
                    found += 1
        assert found > 3 or not calls.required, found


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"type": "string", "contentEncoding": "base64"}}}, "contentEncoding"),
    ({"properties": {"a": {"enum": ["a{end}b"]}}}, "{end}"),
    ({"properties": {"a": {"enum": ["a"], "const": "a"}}}, "const"),
    ({"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}}}, "3 to 2"),
    ({"properties": {"a<b>": {}}}, "a<b>"),
    ({"properties": {"a": False}}, "False"),
    ({"properties": {"a": {"items": {"$ref": "#/properties/a"}, "type": "array"}}}, "#/properties/a"),
    ({"properties": {"a": {}}, "required": ["b"]}, "b"),
    ({"properties": {}, "minProperties": 1}, "minProperties"),
    ({"properties": []}, "properties of names"),
]


@pytest.mark.parametrize(("schema", "why"), REFUSED)
def test_what_cannot_be_said_of_parameters_is_refused(tmp_path: Path, schema: Any, why: str) -> None:
    """parameters.py 4."""
    for name, end in ENDS.items():
        chat = chat_of(tmp_path, name, special=False)
        said = json.loads(json.dumps(schema).replace("{end}", end.strip()))
        tools = [{"type": "function", "function": {"name": "f", "parameters": said}}]
        with pytest.raises(QuartetError) as refused:
            asked(chat, TurnForm(calls=Calls(required=True)), tools)
        assert refused.value.reason == "INVALID_REQUEST"
        assert refused.value.metadata["field"] == "tools.parameters_json"
        assert why.replace("{end}", end.strip()) in refused.value.message
        assert asked(chat, TurnForm(calls=Calls(single=True)), tools), "any parameters may be of it"


PYTHON: list[tuple[str, str, Any]] = [
    ("path", '"a\\n\\"é"', 'a\n"é'),
    ("path", "'[f(x=\\'1\\')]'", "[f(x='1')]"),
    ("path", "'a' 'b'", None),
    ("path", '"\\ud83d"', None),
    ("path", '"\\/"', None),
    ("path", '"<|python_end|>"', None),
    ("path", "12", None),
    ("kind", "'catty'", "catty"),
    ("kind", '"dog"', None),
    ("code", '"日\\\\"', "日\\"),
    ("code", "'a'", None),
    ("code", "'abcde'", None),
    ("n", "9", 9),
    ("n", "10", None),
    ("n", "0x1", None),
    ("x", "-1.5e99", -1.5e99),
    ("x", "1e999", None),
    ("x", "9" * 5000, None),
    ("note", "None", ...),
    ("note", '"None"', "None"),
    ("note", "null", None),
    ("id", "True", True),
    ("tags", "['a', \"b\"]", ["a", "b"]),
    ("tags", "['a', 'b', 'c']", None),
    ("tags", "[1]", None),
    ("at", '{"x": 1, \'next\': {"x": 2}}', {"x": 1, "next": {"x": 2}}),
    ("at", '{"x": 1, "next": {}}', None),
    ("any", '{"a": [True, None, {"b": 1.5}]}', {"a": [True, None, {"b": 1.5}]}),
    ("any", "open('x')", None),
    ("any", "[" * 30 + "]" * 30, None),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", ["pythonic", "pythonic of Olmo", "lfm2"])
def test_literals_are_what_the_schema_says_and_are_read_so(tmp_path: Path, name: str, special: bool) -> None:
    """pythonic.py 1, 2; enforced.py 2, 3."""
    chat = chat_of(tmp_path, name, special)
    least = {"path": '"a"', "kind": "'cat'", "n": "3", "tags": "[]"}

    def call(**values: str) -> str:
        return f"f({', '.join(f'{key}={values[key]}' for key in PARAMETERS['properties'] if key in values)})"

    def all_of(*calls: str) -> str:
        if name == "pythonic":
            return f"[{', '.join(calls)}]"
        if name == "lfm2":
            return f"<|tool_call_start|>[{', '.join(calls)}]<|tool_call_end|>"
        return "<function_calls>\n" + "\n".join(calls) + "\n</function_calls>"

    required = asked(chat, TurnForm(calls=Calls(required=True)), TOOLS)
    begin, end = ("tool_call_start", "tool_call_end") if name == "lfm2" else ("python_start", "python_end")
    for key, said, wanted in PYTHON:
        value = said.replace("python_end", end)
        text = all_of(call(**{**least, key: value}))
        if special and f"<|{end}|>" in value:
            continue  # a special token is no text
        assert passes(chat, required, text) is (wanted is not None), (key, value)
        if wanted is not None:
            content, (one,) = read(chat, text)
            arguments = json.loads(one.arguments_json)
            assert (content, arguments[key]) == ("", None if wanted is ... else wanted), (key, value)
    good, none = call(**least), "fg()"
    assert passes(chat, required, all_of(good, none, good))
    assert [one.name for one in read(chat, all_of(good, none))[1]] == ["f", "fg"]
    for wrong in (
        "", "hello", all_of(), all_of("g()"), all_of("fg(a=1)"), all_of(call(path='"a"')),
        all_of(good) + " more", all_of(good).replace("n=3", "3"), all_of(good.replace("path", "class")),
    ):  # fmt: skip
        assert not passes(chat, required, wrong), wrong
    strict = asked(chat, TurnForm(calls=Calls(strict=frozenset({"f"}))), TOOLS)
    for text in ("", "hello [f()]", all_of(good), all_of("fg(a=[1], b='x')")):
        assert passes(chat, strict, text), text
    for text in (all_of("f()"), all_of("fg(class=1)"), f"so: <|{begin}|>[f()]<|{end}|>"):
        assert not passes(chat, strict, text), text
    if name == "pythonic":
        assert not passes(chat, strict, "[1]") and not passes(chat, strict, "<function_calls>f()")
    else:
        assert passes(chat, strict, "so: " + all_of(good)) and not passes(
            chat, strict, "so: " + all_of("f()")
        )


PYTHON_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"class": {}}}, "class"),
    ({"properties": {"a b": {}}}, "a b"),
    ({"properties": {"ä": {}}}, "ä"),
    ({"properties": {"a": {"type": "string", "format": "regex"}}}, "format"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ({"properties": {"a": {"enum": ["</function_calls>"]}}}, "</function_calls>"),
    ({"properties": {"a": {"const": "\ud83d"}}}, "can be written"),
    ({"properties": {"a": {"$ref": "#"}}}, "$defs"),
    ({"properties": {"a": {"type": "thing"}}}, "thing"),
    ({"properties": {"a": {"minimum": 1}}}, "type of each"),
    ({"properties": {"a": {"not": {}, "type": "null"}}}, "not"),
    ({"properties": {"a": {"allOf": [{}]}}}, "type of each"),
    ({"properties": {"a": {"type": "integer", "const": True}}}, "of the type that is said"),
    ({"properties": {"a": {"type": "string", "enum": [1, None]}}}, "of the type that is said"),
    ({"patternProperties": {}}, "patternProperties"),
]


@pytest.mark.parametrize(("schema", "why"), PYTHON_REFUSED)
def test_what_cannot_be_said_in_python_is_refused(tmp_path: Path, schema: Any, why: str) -> None:
    """pythonic.py 3."""
    chat = chat_of(tmp_path, "pythonic", special=False)
    tools = [{"type": "function", "function": {"name": "a.f", "parameters": schema}}]
    with pytest.raises(QuartetError) as refused:
        asked(chat, TurnForm(calls=Calls(required=True)), tools)
    assert refused.value.metadata["field"] == "tools.parameters_json" and why in refused.value.message
    for name in ("a.if", "ä", "f g", "1f", "a..b"):
        tools[0]["function"] |= {"name": name, "parameters": {}}
        with pytest.raises(QuartetError, match=r"tools\.name"):
            asked(chat, TurnForm(calls=Calls(required=True)), tools)


LEAVES = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        2.5,
        "",
        "a",
        "#/$defs/a",
        "string",
        "integer",
        "null",
        "^a|b$",
        "date",
        "\ud83d",
        "</parameter>",
    ]
)
KEYWORDS = [
    *(
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$ref",
        "$defs",
        "enum",
        "const",
        "anyOf",
        "oneOf",
    ),
    *(
        "items",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "title",
        "a",
    ),
]
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(SIGNS)), SCHEMAS, st.dictionaries(st.sampled_from(KEYWORDS), SCHEMAS, max_size=3)
)
def test_no_schema_is_a_fault(name: str, one: Any, whole: Any) -> None:
    """parameters.py 4, pythonic.py 3: it is enforced or refused; nor is reading by it."""
    properties = {"type": "object", "properties": {"a": one}}
    for schema in (whole, {**whole, **properties}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        spelling = spelling_of(name.split()[0], SIGNS[name])
        form = TurnForm(calls=Calls(required=True))
        with contextlib.suppress(QuartetError):
            turn_grammar(form, tools, spelling, Thinking(Thought.NONE), quoted)
        assert FORMATS["glm45"].read(written("glm45", a="[1]"), schemas_of(tools))[1]
