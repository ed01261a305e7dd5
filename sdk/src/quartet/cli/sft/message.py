"""Messages and tools of a line, in the form in which a chat template gets them.

1. That form is the one in which inference hands over the same conversation (docs/inference.md, Messages), so
   that a model meets in training the prompts that it is served: content is text, the arguments of a call are
   what their JSON says, a tool has a name, a description and parameters.
2. Read are OpenAI's messages, those of rollouts/*.jsonl, whose calls are JSON text (quartet.cli.messages),
   and ShareGPT's, which say `from` and `value`.
3. A message of `weight` 0 is not learned, as by OpenAI; a template is not given the weight.
4. Whatever cannot be read is refused: ValueError with the place, what stands there and what is right.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any, Final, get_args

from quartet.run.sft import Role

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

ROLES: Final[tuple[str, ...]] = get_args(Role)
#: What others call them: OpenAI a newer system message, ShareGPT and those who write its form all of them.
RENAMED: Final = {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
#: Names that ShareGPT's form has for an assistant's message that is nothing but calls, as JSON text.
CALLING: Final = frozenset({"function_call", "tool_call"})
#: Names of the same, the one that templates know first.
REASONING: Final = ("reasoning_content", "reasoning", "thinking")
#: Of a message, by whoever wrote it.
KEYS: Final = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "weight", *REASONING})
SHAREGPT_KEYS: Final = KEYS - {"role", "content"} | {"from", "value"}
FUNCTION_KEYS: Final = frozenset({"name", "description", "parameters"})
#: Of a function, besides: what a template is never given.
PASSED_OVER: Final = frozenset({"type", "strict", "return"})


def message_of(where: str, given: Any) -> Message:
    """A message. Raises ValueError."""
    message = object_of(where, given)
    if is_sharegpt(message):
        message = _renamed(where, message)
    role = _role(where, message)
    thought = next((text for key in REASONING if (text := text_of(where, message, key))), "")
    calls = [
        _call(f"{where}, tool_calls[{number}]", call)
        for number, call in enumerate(list_of(f"{where}, tool_calls", message.get("tool_calls")))
    ]
    if message.get("content") is None and not (calls or thought or role == "tool"):
        name = "value" if is_sharegpt(given) else "content"
        raise ValueError(f'{where} has no {name}; write "{name}": "..."')
    rendered = {"role": role, "content": _content(where, message.get("content"))}
    if thought:
        rendered["reasoning_content"] = thought
    for key in ("tool_call_id", "name"):
        if text := text_of(where, message, key):
            rendered[key] = text
    return rendered | ({"tool_calls": calls} if calls else {})


def tool_of(where: str, given: Any) -> Tool:
    """A tool. Raises ValueError."""
    tool = object_of(where, given)
    function = object_of(f"{where}.function", tool.get("function", tool))
    unknown = unknown_keys(function, FUNCTION_KEYS | PASSED_OVER)
    if unknown:
        raise ValueError(f"{where} has {min(unknown)!r}; a function has name, description and parameters")
    parameters = decoded(f"{where}.parameters", function.get("parameters"))
    return {
        "type": "function",
        "function": {
            "name": _name(where, function),
            "description": text_of(where, function, "description"),
            "parameters": {"type": "object", "properties": {}}
            if parameters is None
            else object_of(f"{where}.parameters", parameters),
        },
    }


def is_learned(where: str, message: Mapping[str, Any]) -> bool:
    """Whether its weight lets it be learned. Raises ValueError."""
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(
            f"{where} has the weight {reprlib.repr(weight)}; write 0 where it is not learned, or 1"
        )
    return weight != 0


def is_malformed(message: Message) -> bool:
    """Whether it has a call whose arguments are no object."""
    return any(not isinstance(one["function"]["arguments"], dict) for one in message.get("tool_calls", ()))


def ignored_of(message: Mapping[str, Any]) -> set[str]:
    """The keys of a message that have a value and no meaning here."""
    return unknown_keys(message, SHAREGPT_KEYS if is_sharegpt(message) else KEYS)


def is_sharegpt(message: Mapping[str, Any]) -> bool:
    """Whether it says `from`, and not `role`."""
    return message.get("role") is None and message.get("from") is not None


def unknown_keys(row: Mapping[str, Any], known: frozenset[str]) -> set[str]:
    """Those that have a value."""
    return {key for key, value in row.items() if key not in known and value is not None}


def _renamed(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """ShareGPT's message by OpenAI's names."""
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    role, value = message["from"], message.get("value")
    if not isinstance(role, str) or role not in CALLING:
        return others | {"role": role, "content": value}
    calls = decoded(f"{where}, value", value)
    return others | {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _role(where: str, message: Mapping[str, Any]) -> str:
    role = message.get("role")
    named = RENAMED.get(role, role) if isinstance(role, str) else None
    if named not in ROLES:
        raise ValueError(
            f"{where} has the role {reprlib.repr(role)}; there are {', '.join(ROLES)}, also called "
            f"{', '.join(RENAMED)}"
        )
    return named


def _content(where: str, content: Any) -> str:
    """Text; parts of text are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"{where} has the content {reprlib.repr(content)}; write text")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            shown = kind if isinstance(kind, str) and kind != "text" else reprlib.repr(part)
            raise ValueError(
                f"{where}, content[{number}] is {shown}; only text is learned: "
                '{"type": "text", "text": "..."}'
            )
        texts.append(part["text"])
    return "".join(texts)


def _call(where: str, call: Any) -> dict[str, Any]:
    call = object_of(where, decoded(where, call))
    function = object_of(f"{where}.function", call.get("function", call))
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict):
        raise ValueError(f"{where} has the arguments {reprlib.repr(arguments)}; write an object, or its JSON")
    return {
        "id": text_of(where, call, "id"),
        "type": "function",
        "function": {
            "name": _name(where, function),
            "arguments": _said(arguments) if isinstance(arguments, str) else arguments,
        },
    }


def _said(arguments: str) -> Any:
    """Templates print arguments as JSON themselves; what is none is printed as it is."""
    try:
        value = json.loads(arguments)
        json.dumps(value, ensure_ascii=False).encode()  # an escape may stand for half a surrogate pair
    except (ValueError, RecursionError):
        return arguments
    return value


def decoded(where: str, value: Any) -> Any:
    """What stands there as JSON text, as tables have to write it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is text that is no JSON ({error})") from error


def object_of(where: str, value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {reprlib.repr(value)}; write an object")
    return value


def list_of(where: str, value: Any) -> list[Any]:
    """A list; null is an empty one."""
    if not isinstance(value, list | None):
        raise ValueError(f"{where} is {reprlib.repr(value)}; write a list")
    return value or []


def text_of(where: str, row: Mapping[str, Any], key: str) -> str:
    """A text of an object; null is an empty one."""
    value = row.get(key)
    if not isinstance(value, str | None):
        raise ValueError(f"{where} has the {key} {reprlib.repr(value)}; write text")
    return value or ""


def _name(where: str, function: Mapping[str, Any]) -> str:
    name = text_of(where, function, "name")
    if not name:
        raise ValueError(f"{where} has no name")
    return name
