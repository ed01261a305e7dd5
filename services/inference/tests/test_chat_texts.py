"""Texts that stand without quotes, and values that a schema enumerates: what it says of them."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import urllib.parse
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet_inference.chat import Chat
from quartet_inference.chat.enforced import Calls, TurnForm
from quartet_inference.chat.texts import FORMATS, regexes
from quartet_inference.structure.following import StructureError, Structures
from quartet_inference.structure.grammar import grammar
from quartet_inference.structure.vocabulary import ll_tokenizer

from .following import end_of, follow
from .random_models import byte_tokenizer
from .test_chat_parameters import asked, chat_of, passes, read, sampled

VALID: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": lambda text: datetime.time.fromisoformat(re.sub(r"\.\d+", "", text)),
    "date-time": lambda text: datetime.datetime.fromisoformat(re.sub(r"\.\d+", "", text)),
    "uuid": uuid.UUID,
    "ipv4": ipaddress.IPv4Address,
    "hostname": lambda text: text.encode("idna"),
    "email": lambda text: re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", text),
    "uri": lambda text: urllib.parse.urlsplit(text).scheme,
}
FINE = {
    "date": ["2024-02-28", "1999-12-31", "2023-04-30", "2024-01-29"],
    "time": ["23:59:59Z", "00:00:00.5+01:00"],
    "date-time": ["2024-02-28T23:59:59Z"],
    "uuid": ["123e4567-e89b-12d3-A456-426614174000"],
    "ipv4": ["127.0.0.1", "255.255.255.255"],
    "hostname": ["localhost", "a-b.example"],
    "email": ["a.b+c@example.org"],
    "uri": ["https://example.org/a?b=c%20d#e", "mailto:a@b.c"],
}
WRONG = {
    "date": ["2023-02-30", "2023-04-31", "2023-13-01", "1-1-1"], "time": ["24:00:00Z", "12:00"],
    "date-time": ["2024-02-28 23:59:59Z", "2024-02-28"], "uuid": ["123"], "ipv4": ["1.2.3", "1.2.3.256"],
    "hostname": ["-a", "a..b", "a b"], "email": ["a@b", "a b@c.d"], "uri": ["//x", "a b:c", "a:%zz"],
}  # fmt: skip


@pytest.fixture(scope="module")
def structures() -> Structures:
    return Structures(lambda: ll_tokenizer(byte_tokenizer(), {258}), {258})


def allows(structures: Structures, schema: dict[str, Any], text: str) -> bool:
    said = grammar(f"start: TEXT\nTEXT: {' & '.join(regexes(schema))}\n", {})
    structures.compile(said)
    return end_of(follow(structures, said, [int(t) for t in byte_tokenizer().encode(text)]), {258})


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_are_what_their_names_say(structures: Structures, kind: str) -> None:
    """texts.py 1."""
    for text in FINE[kind]:
        VALID[kind](text)
        assert allows(structures, {"type": "string", "format": kind}, text), text
    assert not any(allows(structures, {"type": "string", "format": kind}, text) for text in WRONG[kind])


PATTERNS = [
    "^a/b$", "a+", "^(a|b)$", "[|]x$", "^x\\$", "a|b", "^[^$|]+$", "é{2}", "\\^\\d", "a\\/b", "",
    "^a\\\\/b$", "^\\\na\n",
]  # fmt: skip
TEXTS = ["a/b", "xa/bx", "a", "b", "|x", "x$", "xy$", "éé", "^1", "", "\na\n", "ab", "a\\/b"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_are_searched_for_as_json_schema_has_it(structures: Structures, pattern: str) -> None:
    """texts.py 1, 2."""
    schema = {"type": "string", "pattern": pattern}
    told = {text: allows(structures, schema, text) for text in TEXTS}
    assert told == {text: re.search(pattern, text) is not None for text in TEXTS}


def test_a_text_is_all_that_is_said_of_it(structures: Structures) -> None:
    """texts.py 1."""
    schema = {"pattern": "^[a-f0-9-]+$", "minLength": 2, "maxLength": 3}
    told = {text: allows(structures, schema, text) for text in ("a", "ab", "a-1", "abcd", "xy")}
    assert [text for text, fine in told.items() if fine] == ["ab", "a-1"]
    with pytest.raises(StructureError):
        allows(structures, {"pattern": "^ab$", "maxLength": 1}, "a")


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"pattern": "^a|b"}, "brackets around"),
        ({"pattern": 1}, "regular expression"),
        ({"format": "regex"}, "format regex"),
        ({"contentEncoding": "base64"}, "contentEncoding"),
    ],
)
def test_what_cannot_be_said_of_a_text_is_refused(schema: dict[str, Any], why: str) -> None:
    """texts.py 2."""
    with pytest.raises(QuartetError, match=why) as refused:
        regexes(schema)
    assert refused.value.metadata["field"] == "tools.parameters_json"


@pytest.mark.parametrize("pattern", ["a(?=b)", "(a)\\1", "a(b", "x^y"])
def test_what_no_automaton_can_match_is_refused_where_it_is_compiled(
    structures: Structures, pattern: str
) -> None:
    with pytest.raises(StructureError):
        allows(structures, {"pattern": pattern}, "a")


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic"])
def test_random_texts_of_calls_are_valid(tmp_path: Path, name: str) -> None:
    """texts.py 1: as a parameter and as a literal."""
    chat: Chat = chat_of(tmp_path, name, special=False)
    properties: dict[str, Any] = {
        kind.replace("-", "_"): {"type": "string", "format": kind} for kind in ("date-time", "uuid", "ipv4")
    }
    properties["code"] = {"type": "string", "pattern": "^[a-z\"<']+!", "maxLength": 9}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": schema}}]
    said = asked(chat, TurnForm(calls=Calls(required=True, single=True)), tools)
    rng, found = random.Random(4), 0
    for text in filter(None, (sampled(chat, said, rng) for _ in range(6))):
        (call,) = read(chat, text)[1]
        arguments = json.loads(call.arguments_json)
        for kind in ("date-time", "uuid", "ipv4"):
            VALID[kind](arguments[kind.replace("-", "_")])
        assert re.search("^[a-z\"<']+!", arguments["code"]) and len(arguments["code"]) <= 9
        found += 1
    assert found > 2


@pytest.mark.parametrize("types, values, fine", [
    ("string", ["a", None, 1], "'a'"),
    (["string", "null"], ["a", None, 1], "'a' None"),
    ("number", [1, 2.5, True], "1 2.5"),
    ("integer", [1, 2.0, 2.5], "1 2.0"),
    ("boolean", [1, True], "True"),
])  # fmt: skip
def test_what_is_enumerated_is_of_the_type(tmp_path: Path, types: Any, values: list[Any], fine: str) -> None:
    """pythonic.py 1"""
    chat = chat_of(tmp_path, "pythonic", special=False)
    schema = {"properties": {"a": {"type": types, "enum": values}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": schema}}]
    said = asked(chat, TurnForm(calls=Calls(required=True)), tools)
    told = [repr(value) for value in values if passes(chat, said, f"[f(a={value!r})]")]
    assert told == fine.split()
