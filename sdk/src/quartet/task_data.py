"""What a rollout tells of its task: the answer, and what else an environment says of it besides the prompt.

1. It is a JSON object of at most MAX_BYTES. A field that does not fit, or has no form in JSON (NaN), is null,
   and one that says nothing (null, empty) is left out, so that null says nothing else.
2. The fields that answer the task come first (FIRST), and so does the room.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

#: Far more than an answer has, and far less than a conversation.
MAX_BYTES: Final = 4096
#: As Verifiers calls them.
FIRST: Final = ("answer", "info")


def told(data: Mapping[str, Any]) -> str:
    """These fields, as they travel; empty where they say nothing. Values that JSON lacks are written as
    text."""
    said = {name: value for name, value in data.items() if not _says_nothing(value)}
    names = [*(name for name in FIRST if name in said), *(name for name in said if name not in FIRST)]
    parts: list[str] = []
    room = MAX_BYTES - len("{}")
    for name in names:
        for value in (said[name], None):
            part = _field(name, value)
            size = len(part.encode()) + len(",")
            if part and size <= room:
                parts.append(part)
                room -= size
                break
    return f"{{{','.join(parts)}}}" if parts else ""


def read(text: str) -> dict[str, Any] | None:
    """The fields; None where the text is none that `told` makes."""
    if len(text.encode()) > MAX_BYTES:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _says_nothing(value: Any) -> bool:
    # Not by a comparison: that of an array is an array.
    return value is None or (isinstance(value, str | list | dict | tuple) and not value)


def _field(name: str, value: Any) -> str:
    """One field, without braces; empty where it has no form in JSON."""
    try:
        text = json.dumps(
            {name: value}, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str
        )
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which no message takes as it is
        text = json.dumps({name: value}, separators=(",", ":"), allow_nan=False, default=str)
    except (ValueError, TypeError, RecursionError):
        return ""
    return text[1:-1]
