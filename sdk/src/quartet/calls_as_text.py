"""Calls with their arguments as JSON text, for the chat templates that take them in no other form
(DeepSeek-V3's). Whoever serves and whoever trains renders a call in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message; arguments that are a text already, be they JSON or not, stay as they are."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
