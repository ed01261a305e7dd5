"""A message as JSON, in the form that Verifiers writes and reads."""

from __future__ import annotations

import json
from typing import Any

from quartet.v1.common_pb2 import Message


def message_row(message: Message) -> dict[str, Any]:
    """A message; its tool calls as text, as Verifiers saves them."""
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content:
        row["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        row["tool_calls"] = [
            json.dumps({"id": call.id, "name": call.name, "arguments": call.arguments_json})
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        row["tool_call_id"] = message.tool_call_id
    if message.name:  # some templates print it
        row["name"] = message.name
    return row
