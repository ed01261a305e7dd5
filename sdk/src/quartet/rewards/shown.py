"""What people are shown of a row beside its prompt: the columns that are JSON, bounded by quartet.task_data.

1. A column that is none (an array, a date, an object of the script's own) is left out: what stands for it as
   text may be another text in the next process.
2. Looking at a value takes no longer than it takes to see that there is no room for it: such a column is
   null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from quartet import task_data

#: What `task_data.told` makes null.
NO_ROOM: Final = math.nan
NOT_JSON: Final = -1


def told(columns: Mapping[str, Any]) -> str:
    """As it travels; empty where nothing is shown."""
    shown = {}
    for name, value in columns.items():
        left = _room_left(value, task_data.MAX_BYTES)
        if left != NOT_JSON:
            shown[name] = value if left else NO_ROOM
    return task_data.told(shown)


def _room_left(value: Any, room: int) -> int:
    """Of so many bytes, when it is written; 0 where they do not suffice, NOT_JSON where it is no JSON."""
    waiting = [value]
    while waiting and room > 0:
        part = waiting.pop()
        room -= 1
        if isinstance(part, str):
            room -= len(part)
        elif isinstance(part, dict):
            if len(part) > room:
                return 0
            if not all(isinstance(key, str) for key in part):
                return NOT_JSON
            waiting += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            if len(part) > room:
                return 0
            waiting += part
        elif not (part is None or isinstance(part, bool | int | float)):
            return NOT_JSON
    return max(0, room)
