"""Arguments that are written as Python's keywords with literal values, as rules in Lark's notation.

1. What the rules derive is read back (`formats`) as arguments that follow the tool's schema: numbers are
   short enough for Python, strings have no escapes that JSON reads in another way.
2. Arguments come in the schema's order, and no others. Without a schema there may be any, ANY_DEPTH deep.
3. What cannot be said so is refused (INVALID_REQUEST) with the keyword.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quartet.errors import refused

from quartet_inference.chat.parameters import OBJECT, Mark, members_of
from quartet_inference.chat.schemas import ANNOTATIONS, DEFINITIONS, definition, resolved
from quartet_inference.chat.texts import FIELD, escaped, length_of, regexes, unsaid
from quartet_inference.structure.grammar import Part, of_schema, quoted

#: The marks that end the calls of a text, wherever they stand.
ENDS = ("<|python_end|>", "</function_calls>")
#: Of lists and objects without a schema.
ANY_DEPTH = 4
_RESERVED = "|".join((*keyword.kwlist, "__debug__"))
_NAME = f"(?!(?:{_RESERVED})(?:\\.|$))[A-Za-z_][A-Za-z0-9_]*"
#: Of a function.
NAMES = f"{_NAME}(?:\\.{_NAME})*"
_COMMA = "/, ?/"
_COLON = "/: ?/"
#: Digits of Python's own integers are bounded, and a float's are its own.
MAX_INTEGER = 10**18
_INTEGER = "-?(0|[1-9][0-9]{0,17})"
_NUMBER = _INTEGER + "(\\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?"
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_CHARACTER = "([^QUOTE\\\\\\x00-\\x1f\\x7f]|\\\\[nrt\"'\\\\])"
#: Of values, as JSON Schema calls their types.
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
          type(None): "null"}  # fmt: skip
_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": set(_RANGE),
    "number": set(_RANGE),
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


class PythonRules:
    """The rules of one grammar."""

    def __init__(
        self, mark: Mark, rules: list[str], parts: dict[str, Part], ends: Sequence[str] = ENDS
    ) -> None:
        """Rules and parts are added to these. `ends`: the marks that end calls, which no text has."""
        self._rules, self._parts, self._ends = rules, parts, ends
        self._made: dict[str, str] = {}  # names of rules and terminals, by what they are

    def of_any(self) -> str:
        """Any arguments of any names."""
        name = self._terminal(f"/[A-Za-z_][A-Za-z0-9_]*/ & ~/({_RESERVED})/")
        one = f'{name} "=" {self._any(ANY_DEPTH)}'
        return f"({one} ({_COMMA} {one})*)?"

    def of(self, whole: Mapping[str, Any], prefix: str) -> str:
        """Those of a schema. Errors: INVALID_REQUEST."""
        schema = resolved(whole, whole)
        for word in sorted(schema.keys() - OBJECT - ANNOTATIONS - set(DEFINITIONS)):
            raise unsaid(word)
        for name in members_of(schema)[0]:
            if re.fullmatch(_NAME, name) is None:
                raise refused(FIELD, name, "choose names that this model's format of calls can write")
        return self._members(schema, whole, lambda name: quoted(f"{name}="))

    def _members(self, schema: Mapping[str, Any], whole: Any, head: Callable[[str], str]) -> str:
        """Those that the schema names, each where it must or may be, with commas between them."""
        properties, required = members_of(schema)
        more = only = '""'
        for name, one in reversed(properties.items()):
            member = self._rule(f"{head(name)} {self._value(one, whole)}")
            begun = f"{member} {more}"
            only = self._rule(begun if name in required else f"{begun} | {only}")
            more = self._rule(f"{_COMMA} {begun}" if name in required else f"({_COMMA} {member})? {more}")
        return only

    def _value(self, schema: Any, whole: Any) -> str:
        """A literal of a schema. Errors: INVALID_REQUEST."""
        if schema is True or (isinstance(schema, dict) and not schema.keys() - ANNOTATIONS):
            return self._any(ANY_DEPTH)
        if not isinstance(schema, dict):
            raise refused(FIELD, str(schema), "send JSON Schema for each of the properties")
        words = schema.keys() - ANNOTATIONS
        for word, read in (("$ref", self._referred), ("const", self._one), ("enum", self._choice)):
            if word in words:
                for other in sorted(words - {word, "type"}):
                    raise unsaid(other)
                return read(schema[word] if word == "$ref" else _of_types(word, schema), whole)
        if words in ({"anyOf"}, {"oneOf"}):
            return self._either(schema["anyOf" if "anyOf" in words else "oneOf"], whole)
        types = schema.get("type")
        if isinstance(types, list):
            return self._either([{**schema, "type": one} for one in dict.fromkeys(map(str, types))], whole)
        if not isinstance(types, str) or types not in _KEYWORDS:
            raise refused(FIELD, str(types), "say the type of each value")
        for word in sorted(words - {"type"} - _KEYWORDS[types]):
            raise unsaid(word)
        return self._of_type(types, schema, whole)

    def _of_type(self, kind: str, schema: Mapping[str, Any], whole: Any) -> str:
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return self._number(kind, schema)
        if kind == "array":
            least, most = length_of(schema, "minItems", "maxItems")
            item = self._rule(self._value(schema.get("items", True), whole))
            return f'"[" {_listed(item, least, most)} "]"'
        if kind == "object" and schema.get("properties"):
            members = self._members(schema, whole, lambda name: f"{self._one(name)} {_COLON}")
            return f'"{{" {members} "}}"'
        if kind == "object":
            members_of(schema)
            others = schema.get("additionalProperties", True)
            if others is False:
                return '"{}"'
            member = self._rule(f"{self._string({})} {_COLON} {self._value(others, whole)}")
            return f'"{{" {_listed(member, 0, None)} "}}"'
        return {"boolean": '("True" | "False")', "null": '"None"'}[kind]

    def _number(self, kind: str, schema: Mapping[str, Any]) -> str:
        bounds = {word: schema[word] for word in _RANGE if word in schema}
        if not bounds:
            return self._terminal(f"/{_INTEGER if kind == 'integer' else _NUMBER}/")
        limits = {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
        if "exclusiveMinimum" in bounds:
            del limits["minimum"]
        if "exclusiveMaximum" in bounds:
            del limits["maximum"]
        name = f"number_{len(self._parts)}"
        self._parts[name] = of_schema({"type": kind, **limits, **bounds})
        return f"@{name}"

    def _string(self, schema: Mapping[str, Any]) -> str:
        """In quotes of either kind; where it has to match something, without escapes."""
        if schema.keys() & {"pattern", "format"}:
            wanted = " & ".join([*regexes(schema), '/[^"\\\\\\x00-\\x1f\\x7f]*/'])
            return self._terminal(f'"\\"" ({wanted}) "\\"" & ~{self._ended()}')
        least, most = length_of(schema, "minLength", "maxLength")
        times = f"{{{least},{'' if most is None else most}}}"
        quotes = ('"', "'")
        either = " | ".join(f"/{q}{_CHARACTER.replace('QUOTE', q)}{times}{q}/" for q in quotes)
        return self._terminal(f"({either}) & ~{self._ended()}")

    def _ended(self) -> str:
        """A text in which one of the ends is."""
        return f"/(.|\\n)*({'|'.join(map(escaped, self._ends))})(.|\\n)*/"

    def _referred(self, reference: Any, whole: Any) -> str:
        found = definition(reference, whole) if isinstance(reference, str) else None
        if found is None:
            raise refused(FIELD, str(reference), "refer to $defs")
        key = f"reference to {reference}"
        if key not in self._made:
            name = self._made[key] = f"py_{len(self._made)}"
            self._rules.append(f"{name}: {self._value(found, whole)}\n")
        return self._made[key]

    def _choice(self, values: Any, whole: Any) -> str:
        if not isinstance(values, list) or not values:
            raise refused(FIELD, str(values), "enumerate values in a list")
        return f"({' | '.join(self._one(value) for value in values)})"

    def _one(self, value: Any, whole: Any = None) -> str:
        """A literal of this value."""
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            text.encode()
        except ValueError as error:
            raise refused(FIELD, str(value), "choose values that can be written") from error
        if any(end in text for end in self._ends):
            raise refused(FIELD, text, f"choose values without {' and '.join(self._ends)}")
        if not isinstance(value, str):
            return quoted(repr(value))
        single = f"'{value}'"
        plain = not re.search("['\\\\\x00-\x1f\x7f]", value)
        return f"({quoted(text)} | {quoted(single)})" if plain else quoted(text)

    def _either(self, schemas: Any, whole: Any) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise refused(FIELD, str(schemas), "send schemas in a list")
        return f"({' | '.join(self._value(one, whole) for one in schemas)})"

    def _any(self, depth: int) -> str:
        """A literal of any kind, as deep as that."""
        string = self._string({})
        number = self._terminal(f"/{_NUMBER}/")
        ways = [string, number, '"True"', '"False"', '"None"']
        if depth:
            inner = self._any(depth - 1)
            member = f"{string} {_COLON} {inner}"
            ways += [f'"[" {_listed(inner, 0, None)} "]"', f'"{{" {_listed(member, 0, None)} "}}"']
        return self._rule(" | ".join(ways))

    def _terminal(self, wanted: str) -> str:
        return self._named("PY", wanted)

    def _rule(self, wanted: str) -> str:
        return self._named("py", wanted)

    def _named(self, kind: str, wanted: str) -> str:
        """The name of a rule or a terminal; equal ones are one."""
        if wanted not in self._made:
            self._made[wanted] = f"{kind}_{len(self._made)}"
            self._rules.append(f"{self._made[wanted]}: {wanted}\n")
        return self._made[wanted]


def _of_types(word: str, schema: Mapping[str, Any]) -> Any:
    """What `const` or `enum` of a schema says, as far as its type allows it. Errors: INVALID_REQUEST."""
    types, said = schema.get("type"), schema[word]
    if types is None or (word == "enum" and not isinstance(said, list)):
        return said
    allowed = [one for one in (said if word == "enum" else [said]) if _is_of(one, types)]
    if not allowed:
        raise refused(FIELD, f"{word} {said}", "choose values of the type that is said")
    return allowed if word == "enum" else said


def _is_of(value: Any, types: Any) -> bool:
    kinds = {_KINDS[type(value)]}
    if "integer" in kinds or (isinstance(value, float) and value.is_integer()):
        kinds |= {"integer", "number"}
    return not kinds.isdisjoint(
        one for one in (types if isinstance(types, list) else [types]) if isinstance(one, str)
    )


def _listed(one: str, least: int, most: int | None) -> str:
    """So many of these, with commas between them; it is written twice, so that lists in it want a rule."""
    if most == 0:
        return '""'
    more = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
    listed = f"{one} ({_COMMA} {one}){more}"
    return listed if least else f"({listed})?"
