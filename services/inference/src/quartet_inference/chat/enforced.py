"""The grammar of a turn: thinking, then an answer of a given form, or calls as the model writes them.

1. Thinking is free. It comes first where the prompt has opened it, and may where the template knows it; the
   rest begins behind its end. Its closing mark ends it, whatever else is in it, and stands in no text that
   comes without an opened one.
2. A call names one of the tools that may be called, and its arguments follow a schema: the tool's own where
   it is strict or a call is required, else any JSON object.
3. Text turns into a call at the format's mark, and nowhere else: no text has another beginning of calls that
   is read as one, nor the letters of a mark that is a token. What follows the mark is a call.
4. Tools, names and schemas are data: none of them can end the place where it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from quartet.errors import QuartetError, refused

from quartet_inference.chat.parameters import Mark
from quartet_inference.chat.spelling import Spelling
from quartet_inference.chat.texts import FIELD, SPACES, escaped
from quartet_inference.structure.grammar import Part, check_size, grammar, of_schema, quoted

Tools = Sequence[Mapping[str, Any]]

#: White space as templates write it: a line and its indent, never more and more of it.
_TERMINALS = "SPACE: /[ \\t\\r\\n]{1,8}/\nTEXT: /(.|\\n)*/\n"


@dataclass(frozen=True)
class Calls:
    """Which calls a turn may have, or must."""

    required: bool = False
    names: tuple[str, ...] = ()  # empty: of any tool
    single: bool = False
    strict: frozenset[str] = frozenset()  # tools whose arguments follow their schema

    @property
    def enforced(self) -> bool:
        """Whether it says more than that the model may call."""
        return self.required or self.single or bool(self.names or self.strict)


@dataclass(frozen=True)
class TurnForm:
    """What a turn has to be."""

    answer: Part | None = None  # None: text, or calls alone where they are required
    from_first_token: bool = False  # the answer's form: no thinking before it
    calls: Calls = Calls()
    field: str = ""  # of the request, that says it


class Thought(Enum):
    """Where a turn is in its thinking when it begins."""

    NONE = "none"  # and there will be none
    MAY = "may"
    OPENED = "opened"


@dataclass(frozen=True)
class Thinking:
    """How a turn thinks."""

    state: Thought
    begin: str = ""
    end: str = ""


def check_calls(calls: Calls, tools: Tools) -> None:
    """Whether the tools are there that are chosen from. Errors: INVALID_REQUEST."""
    unknown = set(calls.names) - {tool["function"]["name"] for tool in tools}
    if unknown:
        raise refused("tool_choice.names", min(unknown), "name tools of the request")
    if calls.required and not tools:
        raise refused("tool_choice.required", True, "send tools")


def turn_grammar(
    form: TurnForm, tools: Tools, spelling: Spelling | None, thinking: Thinking, mark: Mark
) -> str:
    """The grammar. Errors: INVALID_REQUEST."""
    parts: dict[str, Part] = {}
    rules: list[str] = [_TERMINALS]
    if form.answer is not None:
        parts["answer"] = form.answer
    bodies = [] if spelling is None else _bodies(form.calls, tools, spelling, mark, rules, parts)
    plain = _without_text(form, spelling, bodies, mark)
    if plain is not None:
        turn, first = f"SPACE? {plain}", plain
    else:
        assert spelling is not None, "text alone has no grammar"
        known = thinking.state is not Thought.OPENED and thinking.begin
        # Before the end of thinking nothing is read as text, or as a call, whether it has begun or not.
        rules.append(f"SAID: {_without(thinking.end) if known else 'TEXT'}\n")
        turn = first = _with_text(form.calls, spelling, bodies, mark, rules, "")
        # A text that begins as thinking does is none.
        if known:
            first = _with_text(form.calls, spelling, bodies, mark, rules, thinking.begin)
    if thinking.state is Thought.NONE:
        start = first
    elif thinking.state is Thought.MAY:
        start = f"{first} | {mark(thinking.begin)} thinking {turn}"
    else:
        start = f"thinking {turn}"
    if thinking.state is not Thought.NONE:
        rules.append(_thinking(thinking, mark))
    return grammar(f"start: {start}\n{''.join(rules)}", parts)


def _thinking(thinking: Thinking, mark: Mark) -> str:
    end = mark(thinking.end)
    if end.startswith('"'):
        return f"thinking[suffix={end}]: /(.|\\n)*/\n"
    # Its letters alone would be read as the same mark.
    return f"thinking: THOUGHT {end}\nTHOUGHT: {_without(thinking.end)}\n"


def _without(mark: str) -> str:
    """Any text in which this is not."""
    return f"TEXT & ~/(.|\\n)*{escaped(mark)}(.|\\n)*/"


def _bodies(
    calls: Calls, tools: Tools, spelling: Spelling, mark: Mark, rules: list[str], parts: dict[str, Part]
) -> list[str]:
    """A rule for the calls of each tool that may be called: their names."""
    functions = [tool["function"] for tool in tools]
    bodies: list[str] = []
    own: dict[str, Part] = {}
    first = len(rules)
    written = spelling.arguments(mark, rules, own) if spelling.arguments is not None else None
    for index, function in enumerate(functions):
        name = function["name"]
        if calls.names and name not in calls.names:
            continue
        if re.fullmatch(spelling.names, name) is None:
            raise refused("tools.name", name, "choose a name that this model's format of calls can write")
        schema = function["parameters"] if calls.required or name in calls.strict else None
        arguments = f"arguments_{index}"
        if schema is not None:
            _check_object(schema)
        if written is not None:
            arguments = written.of_any() if schema is None else written.of(schema, arguments)
        else:
            own[arguments] = of_schema({**(schema or {}), "type": "object"})
            arguments = f"@{arguments}"
        rules.append(f"call_{index}: {spelling.body(name, arguments, mark)}\n")
        bodies.append(f"call_{index}")
    check_size("tools", len(json.dumps([*rules[first:], *own.values()])))
    parts.update(own)
    return bodies


def _check_object(schema: Any) -> None:
    if not isinstance(schema, dict):
        raise refused(FIELD, str(schema), "send JSON Schema, an object")
    if schema.get("type", "object") != "object":
        raise refused(FIELD, schema["type"], "say type object: arguments have names")


def _without_text(form: TurnForm, spelling: Spelling | None, bodies: Sequence[str], mark: Mark) -> str | None:
    """A turn that is calls, or an answer of its form; None where it may be text."""
    ways = []
    if form.answer is not None:
        ways.append("@answer")
    if spelling is not None and bodies and (form.calls.required or form.answer is not None):
        ways.append(spelling.calls(bodies, mark, form.calls.single))
    if form.calls.required:
        ways = ways[-1:]
    return f"({' | '.join(ways)})" if ways else None


def _with_text(
    calls: Calls, spelling: Spelling, bodies: Sequence[str], mark: Mark, rules: list[str], not_first: str
) -> str:
    """A turn of text, with calls or without; it does not begin with `not_first`."""
    if not_first:
        first = f"SAID & ~/{SPACES}{escaped(not_first)}(.|\\n)*/"
        rules.append(f"BEGINNING: {spelling.spoken(mark, first)}\n")
    else:
        rules.append(f"SPOKEN: {spelling.spoken(mark, 'SAID')}\n")
    text, name = ("BEGINNING", "0") if not_first else ("SPOKEN", "")
    if not spelling.begin:
        return f"({text} | {spelling.calls(bodies, mark, calls.single)})"
    begin = mark(spelling.begin)
    lazy = "[lazy]" if begin.startswith('"') else ""
    rules.append(f"opened{name}{lazy}: {text} {begin}\n")
    heard = f"opened{name} {spelling.calls(bodies, mark, calls.single, spelling.begin)}"
    if spelling.unopened:
        rules.append(f"unopened{name}[lazy]: {text} {quoted(spelling.unopened)}\n")
        heard += f" | unopened{name} {spelling.calls(bodies, mark, calls.single, spelling.unopened)}"
    rules.append(f"heard{name}: {heard}\n")
    if calls.single:
        return f"({text} | heard{name})"
    return f"({text} | heard{name} heard* SPOKEN)"


def calls_unsupported(parser: str) -> QuartetError:
    """The error of calls that cannot be enforced in a model's format."""
    return QuartetError(
        "NOT_IMPLEMENTED",
        f"tool_choice cannot be enforced: no grammar is made for the way this model writes calls ({parser})",
        field="tool_choice",
        remedy="leave out tool_choice and strict",
    )


def answers_unsupported(parser: str) -> QuartetError:
    """The error of a form for models before whose answers stands what no grammar says."""
    return QuartetError(
        "NOT_IMPLEMENTED",
        f"structure cannot be enforced: no grammar is made of what this model puts before answers ({parser})",
        field="structure",
        remedy="say from_first_token, or have the server set chat.tool_parser",
    )
