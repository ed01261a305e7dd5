"""The formats in which models write tool calls, and which of them a chat template speaks.

1. A format finds its calls in a text and returns the text without them; what cannot be read as a call stays
   in the text.
2. `markers` are the beginnings of its calls: text from the first of them on is not told while it is written.
3. Reading takes time in proportion to the text, whatever a model writes: of MAX_MISREAD beginnings that are
   none, the rest of the text is not looked into, and each is read once, from its beginning to its end.
4. A value of a parameter ends at the first mark that ends values; one that is JSON and may be, behind it: its
   strings may contain that mark. Behind MAX_MISREAD values that begin like JSON and are none, none is JSON.
5. Formats are named as vLLM's `--tool-call-parser` names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quartet_inference.chat.calls import (
    ParsedCall,
    json_before,
    json_call,
    json_calls,
    json_object,
    python_calls,
    skip_space,
    typed_call,
)
from quartet_inference.chat.pythonic import ENDS as PYTHON_ENDS
from quartet_inference.chat.schemas import Schemas, is_text

#: Beginnings that could not be read. Who writes more repeats himself, and one reading of a long text may take
#: tens of milliseconds.
MAX_MISREAD = 64


@dataclass
class Reading:
    """What is known of the tools, and what of a text could not be read."""

    schemas: Schemas
    misread: int = 0  # beginnings of calls
    misread_json: int = 0  # of values of parameters

    def value(self, text: str, at: int, mark: str, schema: Any) -> tuple[str, int]:
        """The value of a parameter that begins here, and the position behind the mark that ends it."""
        if self.misread_json < MAX_MISREAD and not is_text(schema):
            start = skip_space(text, at)
            if text[start : start + 1] in _JSON_BEGINS:
                try:
                    end = json_before(text, start, mark)
                except ValueError:
                    self.misread_json += 1
                else:
                    return text[at:end], end + len(mark)
        return _until(text, at, mark)


#: Of strings, arrays and objects.
_JSON_BEGINS = ('"', "[", "{")
#: Reads the calls that begin behind a marker: (text, position, reading) -> (calls, end); else ValueError.
ReadAt = Callable[[str, int, Reading], tuple[list[ParsedCall], int]]


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls."""

    name: str
    begins: re.Pattern[str]
    markers: tuple[str, ...]
    read_at: ReadAt
    #: The marks that some tokenizers have as special tokens, which texts leave out otherwise.
    special: tuple[str, ...] = ()
    #: The character with which a whole answer that is nothing but calls begins.
    bare: str = ""

    def read(self, text: str, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        """The text without its calls, and the calls."""
        kept: list[str] = []
        calls: list[ParsedCall] = []
        reading = Reading(schemas)
        done = 0
        at = 0
        while reading.misread < MAX_MISREAD and (found := self.begins.search(text, at)) is not None:
            try:
                read, end = self.read_at(text, found.end(), reading)
            except ValueError:
                at = max(found.end(), at + 1)
                reading.misread += 1
                continue
            kept.append(text[done : found.start()])
            calls.extend(read)
            done = at = end
        kept.append(text[done:])
        content = "".join(kept)
        if calls:  # what stands before them may be told by now, as it is
            content = content.rstrip() if kept[0].strip() else content.strip()
        return content, calls


def _close(text: str, at: int, mark: str) -> int:
    """Behind the closing mark; a text may end without it."""
    at = skip_space(text, at)
    if text.startswith(mark, at):
        return at + len(mark)
    if at == len(text):
        return at
    raise ValueError(f"no {mark}")


def _hermes(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    calls, end = json_calls(text, skip_space(text, at))
    return calls, _close(text, end, "</tool_call>")


def _json_list(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    calls, end = json_calls(text, skip_space(text, at))
    after = skip_space(text, end)
    return calls, after + len("<|/tool_call|>") if text.startswith("<|/tool_call|>", after) else end


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")


def _qwen3_coder(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    head = _FUNCTION.match(text, at)
    if head is None:
        raise ValueError("no function")
    written: list[tuple[str, str]] = []
    end = head.end()
    known = reading.schemas.get(head[1].strip(), {})
    while (opened := _PARAMETER.match(text, end)) is not None:
        value, end = reading.value(text, opened.end(), "</parameter>", known.get(opened[1].strip()))
        written.append((opened[1].strip(), value.removeprefix("\n").removesuffix("\n")))
    end = _close(text, end, "</function>")
    after = skip_space(text, end)
    end = after + len("</tool_call>") if text.startswith("</tool_call>", after) else end
    return [typed_call(head[1], written, reading.schemas)], end


_GLM_NAME = re.compile(r"\s*([^\s<]+)")
_GLM_KEY = re.compile(r"\s*<arg_key>")
_GLM_VALUE = re.compile(r"\s*<arg_value>")


def _glm(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    head = _GLM_NAME.match(text, at)
    if head is None:
        raise ValueError("no name")
    written: list[tuple[str, str]] = []
    end = head.end()
    known = reading.schemas.get(head[1], {})
    while (opened := _GLM_KEY.match(text, end)) is not None:
        key, end = _until(text, opened.end(), "</arg_key>")
        opened = _GLM_VALUE.match(text, end)
        if opened is None:
            raise ValueError("no <arg_value>")
        value, end = reading.value(text, opened.end(), "</arg_value>", known.get(key.strip()))
        written.append((key.strip(), value))
    return [typed_call(head[1], written, reading.schemas)], _close(text, end, "</tool_call>")


def _until(text: str, at: int, mark: str) -> tuple[str, int]:
    """What stands before the mark, and the position behind it."""
    end = text.find(mark, at)
    if end < 0:
        raise ValueError(f"no {mark}")
    return text[at:end], end + len(mark)


_MISTRAL_NAME = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")
#: Its templates refuse any other.
_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")


def _mistral(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    head = _MISTRAL_NAME.match(text, at)
    if head is None:  # before version 11: a JSON list
        return json_calls(text, skip_space(text, at))
    arguments, end = json_object(text, head.end())
    own = head[2] if head[2] and _MISTRAL_ID.fullmatch(head[2]) else ""
    return [ParsedCall(head[1], arguments, own)], end


_DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\n]+)\n```json\n|([^<]+)<｜tool▁sep｜>)\s*(?=\{)"
)


def _deepseek(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    calls: list[ParsedCall] = []
    while (head := _DEEPSEEK_CALL.match(text, at)) is not None:
        arguments, at = json_object(text, head.end())
        if head[1] is not None:
            at = _close(text, at, "```")
        at = _close(text, at, "<｜tool▁call▁end｜>")
        calls.append(ParsedCall((head[1] or head[2]).strip(), arguments))
    if not calls:
        raise ValueError("no call")
    return calls, _close(text, at, "<｜tool▁calls▁end｜>")


_KIMI_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*((?:functions\.)?([^\s:<]+)(:\d+)?)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)


def _kimi(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    calls: list[ParsedCall] = []
    while (head := _KIMI_CALL.match(text, at)) is not None:
        arguments, at = json_object(text, head.end())
        at = _close(text, at, "<|tool_call_end|>")
        # With a number it is the call's own; its template prints nothing but that of an earlier call.
        calls.append(ParsedCall(head[2], arguments, head[1] if head[3] else ""))
    if not calls:
        raise ValueError("no call")
    return calls, _close(text, at, "<|tool_calls_section_end|>")


def _llama3_json(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    calls = []
    known = None if text[:at].strip() else reading.schemas  # behind no mark
    at = skip_space(text, at)
    while at < len(text):
        call, at = json_call(text, at, known)
        calls.append(call)
        at = skip_space(text, at)
        if at < len(text):
            if text[at] not in ";,":
                raise ValueError("more than calls")
            at = skip_space(text, at + 1)
    if not calls:
        raise ValueError("no call")
    return calls, at


def _pythonic(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    end = min((i for i in (text.find(m, at) for m in PYTHON_ENDS) if i >= 0), default=-1)
    calls = python_calls(text[at:] if end < 0 else text[at:end])
    return calls, len(text) if end < 0 else text.index(">", end) + 1


_TOOL_CALL = re.compile(r"<tool_call>")
_TAGS = ("<tool_call>", "</tool_call>")

FORMATS = {
    form.name: form
    for form in (
        ToolFormat("hermes", _TOOL_CALL, ("<tool_call>",), _hermes, special=_TAGS),
        ToolFormat(
            "qwen3_coder",
            re.compile(r"<tool_call>(?=\s*<function=)|(?=<function=)"),
            ("<tool_call>", "<function="),
            _qwen3_coder,
            special=_TAGS,
        ),
        ToolFormat(
            "glm45",
            _TOOL_CALL,
            ("<tool_call>",),
            _glm,
            special=(*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        ToolFormat(
            "mistral",
            re.compile(r"\[TOOL_CALLS\]"),
            ("[TOOL_CALLS]",),
            _mistral,
            special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        ),
        ToolFormat(
            "deepseek_v3",
            re.compile("<｜tool▁calls▁begin｜>"),
            ("<｜tool▁calls▁begin｜>",),
            _deepseek,
            special=(
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>",
            ),
        ),
        ToolFormat(
            "kimi_k2",
            re.compile(r"<\|tool_calls_section_begin\|>"),
            ("<|tool_calls_section_begin|>",),
            _kimi,
            special=(
                "<|tool_calls_section_begin|>",
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                "<|tool_calls_section_end|>",
            ),
        ),
        ToolFormat(
            "llama3_json",
            re.compile(r"<\|python_tag\|>|\A\s*(?=\{)"),
            ("<|python_tag|>",),
            _llama3_json,
            special=("<|python_tag|>",),
            bare="{",
        ),
        ToolFormat(
            "pythonic",
            re.compile(r"<\|python_start\|>|<function_calls>|\A\s*(?=\[)"),
            ("<|python_start|>", "<function_calls>"),
            _pythonic,
            special=("<|python_start|>", "<|python_end|>", "<function_calls>", "</function_calls>"),
            bare="[",
        ),
        ToolFormat(
            "json_list",
            re.compile(r"<\|tool_call\|>|functools(?=\[)"),
            ("<|tool_call|>", "functools["),
            _json_list,
            special=("<|tool_call|>", "<|/tool_call|>"),
        ),
    )
}

#: What in a template gives its format away; the first that is there decides.
_SIGNS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|tool_call|>", "json_list"),
    ("functools[", "json_list"),
    ("<|python_start|>", "pythonic"),
    ("<function_calls>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)


def format_of(template: str) -> ToolFormat:
    """The format that a chat template asks for; Hermes where it says nothing."""
    return FORMATS[next((name for sign, name in _SIGNS if sign in template), "hermes")]
