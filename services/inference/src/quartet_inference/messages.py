"""Messages and tools between the contract and what chat templates know."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from quartet.errors import refused
from quartet.kit.fresh import fresh_id
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb

from quartet_inference.chat import Turn


def check_roles(request: pb.GenerateRequest) -> None:
    """Refuse messages of nobody: templates pass over them, or over their role. Errors: INVALID_REQUEST."""
    said = {
        "messages": request.messages.messages,
        "tokens.tail_messages": request.tokens.tail_messages,
    }
    for field, messages in said.items():
        for index, message in enumerate(messages):
            if not message.role:
                remedy = "say whose message it is: system, user, assistant or tool"
                raise refused(f"{field}[{index}].role", "", remedy)


def to_template(message: common_pb2.Message) -> dict[str, Any]:
    """A message in the form that chat templates know."""
    if message.parts:
        raise refused("messages.parts", len(message.parts), "this model reads text; send messages of text")
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    for field in ("reasoning_content", "tool_call_id", "name"):
        if getattr(message, field):
            rendered[field] = getattr(message, field)
    if message.reasoning_content:
        # As the templates of gpt-oss and LFM2.5 call it.
        rendered["thinking"] = message.reasoning_content
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": c.name, "arguments": _arguments(c.arguments_json)},
            }
            for c in message.tool_calls
        ]
    return rendered


def _arguments(text: str) -> Any:
    """Templates print arguments as JSON themselves; what is none is printed as it is."""
    try:
        return _readable(text)
    except (ValueError, RecursionError):
        return text


def _readable(text: str) -> Any:
    """What JSON says, if it can be printed again: an escape may stand for half a surrogate pair.

    Raises ValueError, RecursionError.
    """
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def tool_to_template(tool: common_pb2.ToolDefinition) -> dict[str, Any]:
    """A tool in the form that chat templates know. Errors: INVALID_REQUEST."""
    try:
        parameters = (
            _readable(tool.parameters_json) if tool.parameters_json else {"type": "object", "properties": {}}
        )
    except (ValueError, RecursionError) as error:
        raise refused("tools.parameters_json", tool.parameters_json, f"send JSON Schema ({error})") from error
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def from_turn(turn: Turn) -> common_pb2.Message:
    """A sampled turn as a message; calls without an id of their own get a fresh one."""
    written = Counter(call.id for call in turn.calls) if turn.calls else {}
    calls = [
        common_pb2.ToolCall(
            # Nine letters and digits: the only form that every template takes, Mistral's included.
            id=call.id if call.id and written[call.id] == 1 else fresh_id()[:9],
            name=call.name,
            arguments_json=call.arguments_json,
        )
        for call in turn.calls
    ]
    return common_pb2.Message(
        role="assistant", content=turn.content, reasoning_content=turn.reasoning, tool_calls=calls
    )
