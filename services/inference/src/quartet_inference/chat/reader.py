"""A sampled text as an assistant's turn: thinking, content, tool calls; whole, or while it is written.

1. `TurnReader.finish` is the turn. What `feed` told before is a beginning of it, wherever the turn's parts
   come in the order thinking, content, calls.
2. Where the prompt opened the thinking, the text begins inside it; a text that ends inside it is all
   thinking. Where the prompt has closed it, a closing mark that none opens is text like any other.
3. A call that cannot be read stays in the content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from quartet_inference.chat.calls import ARGUMENT_KEYS, ParsedCall, as_object
from quartet_inference.chat.schemas import Schemas
from quartet_inference.chat.tool_format import ToolFormat

#: How models mark their thinking; the first pair that a template knows is its own.
THINKING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
)

#: Characters that transformers' parser is given at once: it looks for marks in them in a time that grows with
#: the square of their number, a second for a hundred thousand.
PARSED_CHARS = 1024

log = structlog.get_logger()


@dataclass(frozen=True)
class Turn:
    """A sampled assistant turn."""

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]


@dataclass(frozen=True)
class Said:
    """What can be told of a turn that is still being written."""

    reasoning: str
    content: str


class TurnReader(Protocol):
    """Reads one completion."""

    def feed(self, text: str) -> Said:
        """More text; what it adds."""
        ...

    def finish(self, text: str) -> Turn:
        """The turn of the whole text. Independent of `feed`."""
        ...


class FormatReader:
    """Reads by the template's thinking marks and a tool format; either may be None."""

    def __init__(
        self,
        thinking: tuple[str, str] | None,
        opened: bool,
        form: ToolFormat | None,
        schemas: Schemas,
        closed: bool = False,
    ) -> None:
        """`opened`: the prompt ends inside the thinking; `closed`: behind it."""
        self._thinking = thinking
        self._opened = opened
        self._closed = closed
        self._form = form
        self._schemas = schemas
        self._text = ""
        self._told = Said("", "")

    def finish(self, text: str) -> Turn:
        """The turn of the whole text."""
        reasoning, content, _ = self._split(text)
        if self._form is None:
            return Turn(content, reasoning, ())
        content, calls = self._form.read(content, self._schemas)
        return Turn(content, reasoning, tuple(calls))

    def feed(self, text: str) -> Said:
        """More text; what it adds."""
        self._text += text
        reasoning, content, inside = self._split(self._text)
        if inside:
            assert self._thinking is not None
            begin, end = self._thinking
            # Perhaps the model opens again what the prompt has opened: no part of the thinking.
            reasoning = "" if begin.startswith(reasoning) else hold_partial(reasoning, [end]).rstrip("\n")
        elif self._thinking is not None and self._thinking[0].startswith(content.lstrip()):
            content = ""  # perhaps the thinking begins
        else:
            if self._thinking is not None and not reasoning:
                content = hold_partial(content, [self._thinking[1]])
            if self._form is not None:
                content = self._before_calls(content)
        told = self._told
        self._told = Said(_longer(told.reasoning, reasoning), _longer(told.content, content))
        return Said(
            self._told.reasoning[len(told.reasoning) :],
            self._told.content[len(told.content) :],
        )

    def _before_calls(self, content: str) -> str:
        """Content that no call can take away any more."""
        assert self._form is not None
        if self._form.bare and content.lstrip()[:1] in ("", self._form.bare):
            return ""
        begins = [at for at in (content.find(mark) for mark in self._form.markers) if at >= 0]
        content = content[: min(begins)] if begins else hold_partial(content, self._form.markers)
        return content.rstrip()

    def _split(self, text: str) -> tuple[str, str, bool]:
        """Thinking, the rest, and whether the text ends inside the thinking."""
        if self._thinking is None:
            return "", text, False
        begin, end = self._thinking
        inside = self._opened or text.lstrip().startswith(begin)
        if not inside and (self._closed or end not in text):
            return "", text, False
        reasoning, closed, rest = text.partition(end)
        reasoning = reasoning.lstrip().removeprefix(begin).lstrip("\n")
        if not closed:
            return reasoning, "", True
        return reasoning.rstrip("\n"), rest.lstrip("\n"), False


def hold_partial(text: str, marks: Sequence[str]) -> str:
    """The text without an end that may become one of the marks."""
    longest = max(len(mark) for mark in marks) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return text[:at]
    return text


def _longer(told: str, now: str) -> str:
    """What was told stays told."""
    return now if now.startswith(told) else told


class DeclaredReader:
    """Reads by the response template that a tokenizer brings along, with transformers' own parser."""

    def __init__(self, template: dict[str, Any], prefix: str, tools: Sequence[Mapping[str, Any]]) -> None:
        """`prefix` is the end of the prompt, as text with special tokens."""
        self._template = load_response_template(template)
        known = self._template.start_anchor_re.search(prefix) is not None
        self._arguments: dict[str, Any] = {"prefix": prefix if known else "", "tools": list(tools)}
        self._parser: ResponseParser | None = ResponseParser(self._template, **self._arguments)

    def feed(self, text: str) -> Said:
        """More text; what it adds."""
        told = {"content": "", "reasoning_content": "", "thinking": ""}
        if self._parser is None:
            return Said("", "")
        try:
            events = self._parser.feed(text)
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # not what the template says
            log.debug("an answer does not follow the response template", why=str(error))
            self._parser = None  # the rest is told at the end
            return Said("", "")
        for event in events:
            if event["type"] == "region_chunk" and event["field"] in told:
                told[event["field"]] += event["text"]
        return Said(told["reasoning_content"] + told["thinking"], told["content"])

    def finish(self, text: str) -> Turn:
        """The turn of the whole text; all of it content where it does not follow the template."""
        parser = ResponseParser(self._template, **self._arguments)
        try:
            for at in range(0, len(text), PARSED_CHARS):
                parser.feed(text[at : at + PARSED_CHARS])
            message, _ = parser.finalize()
            calls = tuple(_declared_call(call) for call in message.get("tool_calls") or ())
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.debug("an answer does not follow the response template", why=str(error))
            return Turn(text, "", ())
        reasoning = message.get("reasoning_content") or message.get("thinking") or ""
        return Turn(str(message.get("content") or ""), str(reasoning), calls)


def _declared_call(call: dict[str, Any]) -> ParsedCall:
    """What the parser read is any JSON that the model wrote; what is no call raises ValueError."""
    function = call["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("no name")
    arguments = next((function[key] for key in ARGUMENT_KEYS if key in function), None)
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ParsedCall(function["name"], as_object(arguments, written))
