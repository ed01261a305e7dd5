"""Arguments that are written as parameters, each a name and a value of its own, as rules in Lark's notation.

1. What the rules derive is read back (`formats`) as arguments that follow the tool's schema.
2. A text stands as it is, and does not contain the mark that ends it. Any other value is JSON. Where a schema
   allows a text beside other plain types, it stands as it is if it would not be read as JSON, else in quotes.
3. Parameters come in the schema's order, and no others. Without a schema there may be any, of any name.
4. What cannot be said so is refused (INVALID_REQUEST) with the keyword.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quartet.errors import refused

from quartet_inference.chat.schemas import ANNOTATIONS, DEFINITIONS, is_text, plain_types, resolved, texts_of
from quartet_inference.chat.texts import ANY, FIELD, escaped, regexes, unsaid
from quartet_inference.structure.grammar import Part, check_size, of_schema, quoted

#: What Lark's notation says of a mark: text, or a special token.
Mark = Callable[[str], str]

#: Of a whole schema: what is enforced, and what says nothing about calls with the known parameters alone.
OBJECT = {"type", "properties", "required", "additionalProperties", "$schema", "$id", "x-guidance"}
_SPACES = "[ \\t\\r\\n]*"
_INTEGER = "-?(0|[1-9][0-9]*)"
_NUMBER = _INTEGER + "(\\.[0-9]+)?([eE][+-]?[0-9]+)?"
#: A text that is not the beginning of a string, an array or an object of JSON.
_BARE = f'{ANY} & ~/{_SPACES}["\\[{{](.|\\n)*/'
_SCALAR = f"/{_SPACES}(true|false|null|{_NUMBER}){_SPACES}/"
#: How values of the plain types stand beside texts.
_BESIDE = {
    "string": f"{_BARE} & ~{_SCALAR}",
    "null": '"null"',
    "boolean": '"true" | "false"',
    "integer": f"/{_INTEGER}/",
    "number": f"/{_NUMBER}/",
}


@dataclass(frozen=True)
class Parameters:
    """How a format writes them."""

    head: Callable[[str, Mark], str]  # up to the value, by the name in Lark's notation
    end: str  # the mark behind a value
    names: str  # a regular expression of those that are read back
    gap: str = ""  # text between value and end; where there is one, the end is text, too


class ArgumentRules(Protocol):
    """How a format writes the arguments of calls that are not one JSON object."""

    def of_any(self) -> str:
        """Any arguments of any names."""
        ...

    def of(self, whole: Mapping[str, Any], prefix: str) -> str:
        """Those of a tool's schema; `prefix` begins the names of its rules. Errors: INVALID_REQUEST."""
        ...


class ParameterRules:
    """The rules of one grammar."""

    def __init__(self, form: Parameters, mark: Mark, rules: list[str], parts: dict[str, Part]) -> None:
        """Rules and parts are added to these."""
        self._form, self._mark = form, mark
        self._rules, self._parts = rules, parts
        end = quoted(form.end) if form.gap else mark(form.end)
        #: Behind a text: within its own terminal, which else would not know where to end, or behind it.
        self._within = quoted(form.gap + form.end) if end.startswith('"') else ""
        self._behind = "" if self._within else end
        self._names: dict[str, str] = {}  # of terminals, by what they are
        self._definitions_chars = 0  # in all parts

    def of_any(self) -> str:
        """Any parameters of any names."""
        name = self._terminal(f"/{self._form.names}/")
        return f"({self._form.head(name, self._mark)} {self._value_of_any()})*"

    def of(self, whole: Mapping[str, Any], prefix: str) -> str:
        """Those of a schema. Errors: INVALID_REQUEST."""
        schema = resolved(whole, whole)
        for keyword in sorted(schema.keys() - OBJECT - ANNOTATIONS - set(DEFINITIONS)):
            raise unsaid(keyword)
        properties, required = members_of(schema)
        found = []
        for index, (name, one) in enumerate(properties.items()):
            if re.fullmatch(self._form.names, name) is None or name != name.strip():
                raise refused(FIELD, name, "choose names that this model's format of calls can write")
            value = self._value(resolved(one, whole), whole, f"{prefix}_{index}")
            self._rules.append(f"{prefix}_{index}: {self._form.head(quoted(name), self._mark)} {value}\n")
            found.append(f"{prefix}_{index}" + ("" if name in required else "?"))
        return " ".join(found)

    def _value(self, schema: Any, whole: Mapping[str, Any], part: str) -> str:
        """A value and its end."""
        if schema is True or (isinstance(schema, dict) and not schema.keys() - ANNOTATIONS):
            return self._value_of_any()
        if not isinstance(schema, dict):
            raise refused(FIELD, str(schema), "send JSON Schema for each of the properties")
        if is_text(schema):
            return self._text(_text_of(schema, self._form.end))
        types = plain_types(schema, whole)
        if types is not None and "string" in types and types <= _BESIDE.keys():
            beside = " | ".join(_BESIDE[one] for one in sorted(types))
            return f"({self._text(beside)} | {self._json('quoted', {'type': 'string'})})"
        return self._json(part, self._with_definitions(schema, whole))

    def _with_definitions(self, schema: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        """A schema with what it may refer to. Errors: INVALID_REQUEST."""
        if not _refers([schema]):
            return schema
        own = {group: whole[group] for group in DEFINITIONS if group in whole}
        # Of each parameter that refers to them: what is too long is refused before they are looked through.
        self._definitions_chars += len(json.dumps(own))
        check_size("tools", self._definitions_chars)
        _refers([*own.values()])
        return {**schema, **own}

    def _value_of_any(self) -> str:
        return f"({self._text(_BARE)} | {self._json('any', {'type': ['string', 'array', 'object']})})"

    def _json(self, part: str, schema: dict[str, Any]) -> str:
        self._parts.setdefault(part, of_schema(schema))
        return f"@{part} {self._within or self._behind}"

    def _text(self, wanted: str) -> str:
        """A text of this kind that does not contain the mark that ends it."""
        mark = escaped(self._form.end)
        if self._within:
            return self._terminal(f"({wanted}) {self._within} & ~/(.|\\n)*{mark}(.|\\n)+/")
        return self._terminal(f"({wanted}) & ~/(.|\\n)*{mark}(.|\\n)*/") + f" {self._behind}"

    def _terminal(self, wanted: str) -> str:
        """Equal ones are one: a lexer has a state for each place in each of them."""
        if wanted not in self._names:
            self._names[wanted] = f"VALUE{len(self._names)}"
            self._rules.append(f"{self._names[wanted]}: {wanted}\n")
        return self._names[wanted]


def _text_of(schema: Mapping[str, Any], end: str) -> str:
    """A text of a schema. Errors: INVALID_REQUEST."""
    keywords = schema.keys() - ANNOTATIONS
    texts = texts_of(schema)
    if texts is not None:
        for keyword in sorted(keywords - {"type", "enum" if "enum" in keywords else "const"}):
            raise unsaid(keyword)
        for text in texts:
            if end in text:
                raise refused(FIELD, text, f"choose texts without {end}, which ends them")
        return " | ".join(map(quoted, texts))
    return " & ".join(regexes(schema))


def members_of(schema: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """The properties of an object, and which are required. Errors: INVALID_REQUEST."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise refused(FIELD, str(schema), "send JSON Schema: properties of names, required as a list")
    for name in required:
        if not isinstance(name, str) or name not in properties:
            raise refused(FIELD, str(name), "say in properties what is required")
    return properties, frozenset(required)


def _refers(schemas: list[Any]) -> bool:
    """Whether they refer to definitions. Errors: INVALID_REQUEST, where to anything else.

    Any other place is another one in a value's own schema.
    """
    left, found = list(schemas), False
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += one.values()
            reference = one.get("$ref")
            if not isinstance(reference, str):
                continue
            if not reference.startswith(tuple(f"#/{group}/" for group in DEFINITIONS)):
                raise refused(FIELD, reference, "refer to $defs: each parameter has a grammar of its own")
            found = True
        elif isinstance(one, list):
            left += one
    return found
