"""Grammars as llguidance reads them: a main one, and named parts that it refers to as @name.

1. What a caller sends is a part of its own, never pasted into another: it can close no bracket of ours.
2. A structure is at most MAX_STRUCTURE_CHARS long; its syntax is checked where it is compiled (`following`).
3. JSON Schemas are taken with OPTIONS, before what the schema's own "x-guidance" says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import LLMatcher
from quartet.errors import refused
from quartet.v1 import common_pb2

#: Structure says so. Compiling takes time and memory in proportion, and every worker of an engine reads it.
MAX_STRUCTURE_CHARS = 131_072
#: JSON on one line, with a space behind `:` and `,` or without: where any white space may stand, a model that
#: does not know how to go on writes nothing else. Discriminated unions say oneOf where they mean anyOf.
OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": True,
}

#: A grammar without a name.
Part = dict[str, Any]


def form_of(structure: common_pb2.Structure) -> Part:
    """What a structure allows. Errors: INVALID_REQUEST."""
    kind = structure.WhichOneof("form")
    if kind is None:
        raise refused("structure", "empty", "say one form, or leave it out")
    if kind == "json_object":
        if not structure.json_object:
            raise refused("structure.json_object", False, "leave the structure out")
        return of_schema({"type": "object"})
    text = getattr(structure, kind)
    check_size(f"structure.{kind}", len(text))
    if kind == "json_schema":
        return of_schema(parsed_schema(text, "structure.json_schema"))
    if kind == "regex":
        return dict(json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0], name=None)
    return lark(text)


def parsed_schema(text: str, field: str) -> dict[str, Any]:
    """A JSON Schema. Errors: INVALID_REQUEST."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(field, text, f"send JSON Schema ({error})") from error
    if not isinstance(schema, dict):
        raise refused(field, text, "send JSON Schema, an object")
    return schema


def check_size(field: str, characters: int) -> None:
    """Errors: INVALID_REQUEST."""
    if characters > MAX_STRUCTURE_CHARS:
        raise refused(field, f"{characters} characters", f"send at most {MAX_STRUCTURE_CHARS}")


def of_schema(schema: Mapping[str, Any]) -> Part:
    """JSON that follows a schema."""
    own = schema.get("x-guidance")
    options = {**OPTIONS, **own} if isinstance(own, dict) else OPTIONS
    return {"json_schema": {**schema, "x-guidance": options}}


def lark(text: str) -> Part:
    """What a grammar in Lark's notation derives from `start`."""
    return {"lark_grammar": text}


def of_choices(texts: Iterable[str]) -> str:
    """A grammar in Lark's notation: one of these texts."""
    return f"start: {' | '.join(map(quoted, texts))}"


def quoted(text: str) -> str:
    """A text in Lark's notation."""
    # Lark's strings are JSON's, but for the one control character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def grammar(main: str, parts: Mapping[str, Part]) -> str:
    """The whole grammar: the main one in Lark's notation, and the parts that it refers to."""
    named = [{"name": "main", **lark(main)}, *({**part, "name": name} for name, part in parts.items())]
    return json.dumps({"grammars": named})
