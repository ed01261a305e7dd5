"""The formats in which models write tool calls, and which of them a chat template speaks.

1. Formats are named as vLLM's `--tool-call-parser` names them.
2. A reader raises ValueError for what is no call of its format, and nothing else.
"""

from __future__ import annotations

import json
import re

from quartet_inference.chat.calls import (
    ParsedCall,
    json_call,
    json_calls,
    json_object,
    python_calls,
    skip_space,
    typed_call,
)
from quartet_inference.chat.gemma import QUOTE, braced_call
from quartet_inference.chat.pythonic import ENDS as PYTHON_ENDS
from quartet_inference.chat.shown import CALL
from quartet_inference.chat.tool_format import Reading, ToolFormat, close, skip_mark, until

LFM2_END = "<|tool_call_end|>"
_TOOL_CALL = re.compile(r"<tool_call>")
_TAGS = ("<tool_call>", "</tool_call>")


def _hermes(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    calls, end = json_calls(text, skip_space(text, at))
    return calls, close(text, end, "</tool_call>")


_HERMES = ToolFormat("hermes", _TOOL_CALL, ("<tool_call>",), _hermes, special=_TAGS)


def _json_list(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    calls, end = json_calls(text, skip_space(text, at))
    return calls, skip_mark(text, end, "<|/tool_call|>")


_JSON_LIST = ToolFormat(
    "json_list",
    re.compile(r"<\|tool_call\|>|functools(?=\[)"),
    ("<|tool_call|>", "functools["),
    _json_list,
    special=("<|tool_call|>", "<|/tool_call|>"),
)


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
    end = close(text, end, "</function>")
    return [typed_call(head[1], written, reading.schemas)], skip_mark(text, end, "</tool_call>")


_QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    re.compile(r"<tool_call>(?=\s*<function=)|(?=<function=)"),
    ("<tool_call>", "<function="),
    _qwen3_coder,
    special=_TAGS,
)


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
        key, end = until(text, opened.end(), "</arg_key>")
        opened = _GLM_VALUE.match(text, end)
        if opened is None:
            raise ValueError("no <arg_value>")
        value, end = reading.value(text, opened.end(), "</arg_value>", known.get(key.strip()))
        written.append((key.strip(), value))
    return [typed_call(head[1], written, reading.schemas)], close(text, end, "</tool_call>")


_GLM45 = ToolFormat(
    "glm45",
    _TOOL_CALL,
    ("<tool_call>",),
    _glm,
    special=(*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


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


_MISTRAL = ToolFormat(
    "mistral",
    re.compile(r"\[TOOL_CALLS\]"),
    ("[TOOL_CALLS]",),
    _mistral,
    special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)


_DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\n]+)\n```json\n|([^<]+)<｜tool▁sep｜>)\s*(?=\{)"
)


def _deepseek(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    calls: list[ParsedCall] = []
    while (head := _DEEPSEEK_CALL.match(text, at)) is not None:
        arguments, at = json_object(text, head.end())
        if head[1] is not None:
            at = close(text, at, "```")
        at = close(text, at, "<｜tool▁call▁end｜>")
        calls.append(ParsedCall((head[1] or head[2]).strip(), arguments))
    if not calls:
        raise ValueError("no call")
    return calls, close(text, at, "<｜tool▁calls▁end｜>")


_DEEPSEEK_V3 = ToolFormat(
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
)


_KIMI_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*((?:functions\.)?([^\s:<]+)(:\d+)?)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)


def _kimi(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    calls: list[ParsedCall] = []
    while (head := _KIMI_CALL.match(text, at)) is not None:
        arguments, at = json_object(text, head.end())
        at = close(text, at, "<|tool_call_end|>")
        # With a number it is the call's own; its template prints nothing but that of an earlier call.
        calls.append(ParsedCall(head[2], arguments, head[1] if head[3] else ""))
    if not calls:
        raise ValueError("no call")
    return calls, close(text, at, "<|tool_calls_section_end|>")


_KIMI_K2 = ToolFormat(
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
)


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


_LLAMA3_JSON = ToolFormat(
    "llama3_json",
    re.compile(r"<\|python_tag\|>|\A\s*(?=\{)"),
    ("<|python_tag|>",),
    _llama3_json,
    special=("<|python_tag|>",),
    bare="{",
)


def _pythonic(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    ends = [found for mark in PYTHON_ENDS if (found := text.find(mark, at)) >= 0]
    if not ends:
        return python_calls(text[at:]), len(text)
    end = min(ends)
    return python_calls(text[at:end]), text.index(">", end) + 1


_PYTHONIC = ToolFormat(
    "pythonic",
    re.compile(r"<\|python_start\|>|<function_calls>|\A\s*(?=\[)"),
    ("<|python_start|>", "<function_calls>"),
    _pythonic,
    special=("<|python_start|>", "<function_calls>", *PYTHON_ENDS),
    bare="[",
)


def _lfm2(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    found = text.find(LFM2_END, at)
    end = found if found >= 0 else len(text)
    return python_calls(text[at:end]), skip_mark(text, end, LFM2_END)


_LFM2 = ToolFormat(
    "lfm2",
    re.compile(r"<\|tool_call_start\|>"),
    ("<|tool_call_start|>",),
    _lfm2,
    special=("<|tool_call_start|>", LFM2_END),
)


def _gemma4(text: str, at: int, reading: Reading) -> tuple[list[ParsedCall], int]:
    call, end = braced_call(text, at)
    end = close(text, end, "<tool_call|>")
    return [call], skip_mark(text, end, "<|tool_response>")


_GEMMA4 = ToolFormat(
    "gemma4",
    re.compile(r"<\|tool_call>"),
    ("<|tool_call>",),
    _gemma4,
    special=("<|tool_call>", "<tool_call|>", "<|tool_response>", QUOTE),
)


FORMATS = {
    form.name: form
    for form in (
        _HERMES,
        _QWEN3_CODER,
        _GLM45,
        _MISTRAL,
        _DEEPSEEK_V3,
        _KIMI_K2,
        _LLAMA3_JSON,
        _PYTHONIC,
        _JSON_LIST,
        _LFM2,
        _GEMMA4,
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
    ("<|tool_call>", "gemma4"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("functools[", "json_list"),
    ("<|python_start|>", "pythonic"),
    ("<function_calls>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
)
#: What is in others' templates, too.
_WEAK_SIGN = ('"parameters": ', "llama3_json")


def format_of(template: str, written: str | None = None) -> ToolFormat | None:
    """The format that a chat template asks for.

    Its text says it (Llama 4's writes the calls of earlier turns otherwise), or the call that it writes
    (`shown.Shown.call`; None: it writes none). None where it writes one that no format reads.
    """
    sign = next((name for sign, name in _SIGNS if sign in template), None)
    if sign is not None:
        return FORMATS[sign]
    likely = FORMATS[_WEAK_SIGN[1] if _WEAK_SIGN[0] in template else "hermes"]
    if written is None:
        return likely
    return next((form for form in (likely, *FORMATS.values()) if _reads(form, written)), None)


def _reads(form: ToolFormat, written: str) -> bool:
    """Whether it reads CALL."""
    _, calls = form.read(written, {})
    arguments = json.loads(CALL.arguments_json)
    return [(call.name, json.loads(call.arguments_json)) for call in calls] == [(CALL.name, arguments)]
