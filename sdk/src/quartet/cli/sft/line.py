"""A line of the data, in the form in which a chat template gets a conversation.

1. That form is the one in which inference hands over the same conversation (docs/inference.md, Messages), so
   that a model meets in training the prompts that it is served: content is text, the arguments of a call are
   what their JSON says, a tool has a name, a description and parameters.
2. Read are OpenAI's form and the lines of rollouts/*.jsonl, whose calls are JSON text (quartet.cli.messages).
3. What says nothing of the conversation is left out and named; what cannot be read is refused.
"""

from __future__ import annotations

import enum
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from quartet.run.sft import Role

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

FORM = 'write {"messages": [{"role", "content"}, ...]}, and "tools": [...] beside it where there are some'
ROLES: tuple[str, ...] = get_args(Role)
#: A developer's message is what a system message was called before.
RENAMED = {"developer": "system"}
#: Names of the same, the one that templates know first.
REASONING = ("reasoning_content", "reasoning", "thinking")
LINE_KEYS = frozenset({"messages", "tools"})
MESSAGE_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", *REASONING})
FUNCTION_KEYS = frozenset({"name", "description", "parameters"})
#: Of a function, besides: what a template is never given.
PASSED_OVER = frozenset({"type", "strict", "return"})
#: What every line of rollouts/*.jsonl has, and no other file is likely to.
ROLLOUT_KEYS = frozenset({"env", "group", "member", "reward"})


@dataclass(frozen=True)
class Conversation:
    """What a line says, and the keys in which it says something else."""

    messages: Sequence[Message]
    tools: Sequence[Tool]
    ignored: frozenset[str]

    @property
    def calls_unlisted(self) -> bool:
        """Whether tools are called, and none are listed."""
        return not self.tools and any("tool_calls" in message for message in self.messages)


class Omitted(enum.Enum):
    """A rollout from which nothing can be learned, and why."""

    WITHOUT_MESSAGES = "without messages (the run's messages_of_members says how many of a group have them)"
    FAILED = "failed"


def conversation_of(line: str) -> Conversation | Omitted:
    """Read a line. Raises ValueError."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a chat, but no JSON ({error}); {FORM}") from error
    if not isinstance(row, dict):
        raise ValueError(f"not a chat; {FORM}")
    rollout = row.keys() >= ROLLOUT_KEYS
    if rollout and row.get("failure") is not None:
        return Omitted.FAILED
    if rollout and "messages" not in row:
        return Omitted.WITHOUT_MESSAGES
    given = row.get("messages")
    if not isinstance(given, list) or not given:
        raise ValueError(f"not a chat; {FORM}")
    messages = [_message(f"message {number}", message) for number, message in enumerate(given, start=1)]
    tools = [
        _tool(f"tools[{number}]", tool)
        for number, tool in enumerate(_list("tools", _decoded("tools", row.get("tools"))))
    ]
    try:
        json.dumps([messages, tools], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has half a surrogate pair, which is no text") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return Conversation(messages, tools, _ignored(row, of_line=not rollout))


def _ignored(row: Mapping[str, Any], *, of_line: bool) -> frozenset[str]:
    """The keys that have a value and no meaning here; of the line itself only where it is no rollout's."""
    lines = _unknown(row, LINE_KEYS) if of_line else set()
    return frozenset(lines).union(
        f"messages[].{key}" for message in row["messages"] for key in _unknown(message, MESSAGE_KEYS)
    )


def _unknown(row: Mapping[str, Any], known: frozenset[str]) -> set[str]:
    return {key for key, value in row.items() if key not in known and value is not None}


def _message(where: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"not a chat: {where} is {reprlib.repr(message)}; {FORM}")
    role = message.get("role")
    if not isinstance(role, str) or RENAMED.get(role, role) not in ROLES:
        known = ", ".join([*ROLES, *RENAMED])
        raise ValueError(f"{where} has the role {reprlib.repr(role)}; there are {known}")
    thought = next((text for key in REASONING if (text := _text(where, message, key))), "")
    calls = [
        _call(f"{where}, tool_calls[{number}]", call)
        for number, call in enumerate(_list(f"{where}, tool_calls", message.get("tool_calls")))
    ]
    if message.get("content") is None and not (calls or thought or role == "tool"):
        raise ValueError(f"not a chat: {where} has no content; {FORM}")
    rendered = {"role": RENAMED.get(role, role), "content": _content(where, message.get("content"))}
    if thought:
        rendered["reasoning_content"] = thought
    for key in ("tool_call_id", "name"):
        if text := _text(where, message, key):
            rendered[key] = text
    return rendered | ({"tool_calls": calls} if calls else {})


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
    call = _object(where, _decoded(where, call))
    function = _object(f"{where}.function", call.get("function", call))
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict):
        raise ValueError(f"{where} has the arguments {reprlib.repr(arguments)}; write an object, or its JSON")
    return {
        "id": _text(where, call, "id"),
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


def _tool(where: str, tool: Any) -> Tool:
    tool = _object(where, tool)
    function = _object(f"{where}.function", tool.get("function", tool))
    unknown = _unknown(function, FUNCTION_KEYS | PASSED_OVER)
    if unknown:
        raise ValueError(f"{where} has {min(unknown)!r}; a function has name, description and parameters")
    parameters = _decoded(f"{where}.parameters", function.get("parameters"))
    return {
        "type": "function",
        "function": {
            "name": _name(where, function),
            "description": _text(where, function, "description"),
            "parameters": {"type": "object", "properties": {}}
            if parameters is None
            else _object(f"{where}.parameters", parameters),
        },
    }


def _decoded(where: str, value: Any) -> Any:
    """What stands there as JSON text, as tables have to write it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is text that is no JSON ({error})") from error


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {reprlib.repr(value)}; write an object")
    return value


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list | None):
        raise ValueError(f"{where} is {reprlib.repr(value)}; write a list")
    return value or []


def _text(where: str, row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str | None):
        raise ValueError(f"{where} has the {key} {reprlib.repr(value)}; write text")
    return value or ""


def _name(where: str, function: Mapping[str, Any]) -> str:
    name = _text(where, function, "name")
    if not name:
        raise ValueError(f"{where} has no name")
    return name
