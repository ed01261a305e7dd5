"""Messages of a script as they travel, and those that travelled as its functions are given them.

1. Read are the messages that chat templates know: a role of ROLES, text or parts of text as content, an
   assistant's calls and the answers to them. A key that is null is not there.
2. What cannot be read is refused: ValueError with the place, what stands there and what is right. Other keys
   of a message say nothing to a template; `passed_over` names them.
3. Functions are given TRL's form of a message: no key without a value but content, arguments of calls as
   objects, no ids.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from quartet.cli.sft.columns import without_nulls
from quartet.v1 import common_pb2, inference_service_pb2

ROLES: Final = ("system", "user", "assistant", "tool", "developer")
#: Those that are text.
TEXTS: Final = ("reasoning_content", "tool_call_id", "name")
KEYS: Final = frozenset({"role", "content", "tool_calls", *TEXTS})


def prompt_of(where: str, given: Sequence[Any]) -> inference_service_pb2.MessagesPrompt:
    """A conversation. Raises ValueError."""
    messages = [_message(f"{where}[{number}]", message) for number, message in enumerate(given)]
    return inference_service_pb2.MessagesPrompt(messages=messages)


def passed_over(given: Sequence[Mapping[str, Any]]) -> set[str]:
    """The keys of messages that have a value and no meaning."""
    return {
        key for message in given for key, value in message.items() if key not in KEYS and value is not None
    }


def given_of(message: common_pb2.Message) -> dict[str, Any]:
    """A message as functions are given it (3)."""
    given: dict[str, Any] = {"role": message.role}
    if message.name:
        given["name"] = message.name
    given["content"] = message.content
    if message.reasoning_content:
        given["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        given["tool_calls"] = [
            {"type": "function", "function": {"name": one.name, "arguments": _arguments(one)}}
            for one in message.tool_calls
        ]
    return given


def _arguments(call: common_pb2.ToolCall) -> Any:
    """What JSON says; of what is none its text."""
    try:
        return json.loads(call.arguments_json or "{}")
    except (ValueError, RecursionError):
        return call.arguments_json


def _message(where: str, given: Any) -> common_pb2.Message:
    if not isinstance(given, Mapping):
        raise ValueError(f'{where} = {reprlib.repr(given)} is refused: give {{"role": ..., "content": ...}}')
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise ValueError(f'{where}["role"] = {reprlib.repr(role)} is refused: give one of {", ".join(ROLES)}')
    message = common_pb2.Message(role=role, content=_content(f'{where}["content"]', content))
    for key in TEXTS:
        if (text := given.get(key)) is not None:
            setattr(message, key, _text(f"{where}[{key!r}]", text))
    calls = given.get("tool_calls")
    if not isinstance(calls, list | None):
        raise ValueError(f'{where}["tool_calls"] = {reprlib.repr(calls)} is refused: give a list')
    message.tool_calls.extend(
        _call(f'{where}["tool_calls"][{number}]', call) for number, call in enumerate(calls or ())
    )
    if content is None and not (message.tool_calls or message.reasoning_content):
        raise ValueError(f'{where} has no content; give "content": "..."')
    return message


def _content(where: str, content: Any) -> str:
    """Text; parts of text are joined."""
    if not isinstance(content, list):
        return "" if content is None else _text(where, content)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            shown = reprlib.repr(part) if kind is None else f"a part of type {kind!r}"
            raise ValueError(
                f"{where}[{number}] is {shown}, and the model is given only text; give "
                '{"type": "text", "text": "..."}, or leave the example out'
            )
        texts.append(_text(f'{where}[{number}]["text"]', part.get("text")))
    return "".join(texts)


def _call(where: str, call: Any) -> common_pb2.ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        right = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        raise ValueError(f"{where} = {reprlib.repr(call)} is refused: give {right}")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        try:
            arguments = json.dumps(without_nulls(dict(arguments)), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{where}: its arguments have what JSON does not have: {error}") from error
    return common_pb2.ToolCall(
        id=_text(f'{where}["id"]', call.get("id") or ""),
        name=_text(f'{where}["function"]["name"]', function.get("name")),
        arguments_json=_text(f'{where}["function"]["arguments"]', arguments),
    )


def _text(where: str, text: Any) -> str:
    """Raises ValueError where it is none, or none that can be sent."""
    if not isinstance(text, str):
        raise ValueError(f"{where} = {reprlib.repr(text)} is refused: give text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} has half a surrogate pair, which is no text; mend it") from None
    return text
