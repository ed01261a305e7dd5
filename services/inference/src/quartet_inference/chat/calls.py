"""Reading one tool call out of text: JSON, XML-like parameters, Python.

1. Arguments that the model wrote as JSON are handed on exactly as written, to the character, all of them or
   single ones.
2. What is not a call raises ValueError; nothing else is raised, however deep or long the text. A call that
   reads as half a surrogate pair, which no message can carry, is none; arguments as written may escape one.
3. Arguments are JSON, whatever they were read from: no NaN, no infinity by name.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from quartet_inference.chat.schemas import Schemas, is_text, plain_types

P = ParamSpec("P")
T = TypeVar("T")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
#: The keys under which the formats put the arguments; Llama says "parameters".
ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class ParsedCall:
    """A tool call as the model wrote it."""

    name: str
    arguments_json: str
    #: As the model wrote it, where its format has one: by that it knows the call's answer again.
    id: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        (self.name + self.arguments_json).encode()  # raises UnicodeEncodeError, a ValueError


def _only_value_errors(read: Callable[P, T]) -> Callable[P, T]:
    @wraps(read)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except (IndexError, TypeError, RecursionError, MemoryError, SyntaxError) as error:
            raise ValueError(str(error)) from error

    return guarded


def skip_space(text: str, at: int) -> int:
    """The next position that holds no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


@_only_value_errors
def json_object(text: str, at: int) -> tuple[str, int]:
    """The object that begins here, as written, and where it ends."""
    value, end = _DECODER.raw_decode(text, at)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return text[at:end], end


@_only_value_errors
def json_call(text: str, at: int, known: Collection[str] | None = None) -> tuple[ParsedCall, int]:
    """The call {"name": ..., "arguments": ...} that begins here, and where it ends.

    `known` are the tools' names where nothing but the text itself says that it is a call: one of another name
    is a call only with arguments.
    """
    _, end = json_object(text, at)
    members: dict[str, tuple[Any, str]] = {}
    at = skip_space(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = skip_space(text, skip_space(text, at) + 1)
        value, at = _DECODER.raw_decode(text, start)
        members[key] = (value, text[start:at])
        at = skip_space(text, at)
        if text[at] == ",":
            at = skip_space(text, at + 1)
    name, _ = members.get("name", (None, ""))
    value, written = next((members[key] for key in ARGUMENT_KEYS if key in members), (None, ""))
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    if known is not None and name not in known and members.keys().isdisjoint(ARGUMENT_KEYS):
        raise ValueError("an answer about something that has a name")
    return ParsedCall(name, as_object(value, written)), end


def as_object(value: Any, written: str) -> str:
    """Arguments as written; some models quote the object, some write null or an empty text for none.

    ValueError for what is none of these.
    """
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        _, end = json_object(value, skip_space(value, 0))
        if skip_space(value, end) < len(value):
            raise ValueError("more than an object")
        return value
    if not isinstance(value, dict):
        raise ValueError("arguments are no object")
    return written


@_only_value_errors
def json_calls(text: str, at: int) -> tuple[list[ParsedCall], int]:
    """A list of calls, or one, that begins here, and where it ends."""
    if text[at] != "[":
        call, end = json_call(text, at)
        return [call], end
    calls = []
    at = skip_space(text, at + 1)
    while text[at] != "]":
        call, at = json_call(text, at)
        calls.append(call)
        at = skip_space(text, at)
        if text[at] == ",":
            at = skip_space(text, at + 1)
    if not calls:
        raise ValueError("no call")
    return calls, at + 1


def typed_call(name: str, written: Sequence[tuple[str, str]], schemas: Schemas) -> ParsedCall:
    """A call whose arguments are bare text: the tool's schema says what is a text and what may be JSON."""
    name = name.strip()
    if not name:
        raise ValueError("no name")
    known = schemas.get(name, {})
    arguments = {key: _typed(text, known.get(key)) for key, text in written}
    members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
    return ParsedCall(name, f"{{{', '.join(members)}}}")


def _typed(text: str, schema: Any) -> str:
    """The text in JSON, which it may be already."""
    if not is_text(schema):
        try:
            _STRICT.decode(text)
        except (ValueError, RecursionError):
            pass  # of a kind that is written without quotes
        else:
            return text.strip()
        word = _PYTHON_WORDS.get(text.strip())
        types = plain_types(schema, None) if word is not None and isinstance(schema, dict) else None
        if word is not None and types is not None and word[0] in types and "string" not in types:
            return word[1]
    return json.dumps(text, ensure_ascii=False)


#: As templates print values that print Python's text of them, with the type that each is of.
_PYTHON_WORDS = {"True": ("boolean", "true"), "False": ("boolean", "false"), "None": ("null", "null")}


#: Numbers are not computed: they may be longer than Python reads.
_STRICT = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_no_constant)


def json_before(text: str, at: int, mark: str) -> int:
    """Where the mark stands behind the JSON that begins here; else ValueError."""
    _, end = _only_value_errors(_STRICT.raw_decode)(text, at)
    end = skip_space(text, end)
    if not text.startswith(mark, end):
        raise ValueError(f"no {mark}")
    return end


class _JsonNames(ast.NodeTransformer):
    """JSON's names for what Python calls otherwise, as templates write them that print arguments as JSON."""

    _VALUES = {"true": True, "false": False, "null": None}  # noqa: RUF012 - of the class alone

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A constant, where it is one of them."""
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


@_only_value_errors
def python_calls(text: str) -> list[ParsedCall]:
    """Calls with literal keyword arguments: `[f(a=1), g(b="x")]`, or one on each line."""
    tree = ast.parse(text.strip())
    calls = []
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        nodes = value.elts if isinstance(value, ast.List) else [value]
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args:
                raise ValueError("not a call with keyword arguments")
            if any(word.arg is None for word in node.keywords):
                raise ValueError("arguments by name only")
            if len({word.arg for word in node.keywords}) < len(node.keywords):
                raise ValueError("an argument twice")
            arguments = {word.arg: ast.literal_eval(_JsonNames().visit(word.value)) for word in node.keywords}
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            calls.append(ParsedCall(_dotted(node.func), written))
    if not calls:
        raise ValueError("no call")
    return calls


def _dotted(node: ast.expr) -> str:
    """`f`, or `f.g`: any other expression is no name of a tool."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("no name")
    return node.id
