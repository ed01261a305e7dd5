"""The arguments of a model's tool calls: JSON that the model wrote, and what it got wrong is told to it.

Pinned to verifiers 0.4.0: `tolerate_deep_arguments` wraps a private function.
"""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic_core import to_json
from verifiers.v1 import graph

# A call to a tool server has its arguments inside so many objects, or fewer; pydantic writes 255 at most.
LEVELS_AROUND: Final = 16


def read_arguments(text: str) -> Any:
    """The value. Raises ValueError: no JSON, or none that can be handed on to a tool."""
    try:
        value = sent = json.loads(text or "{}")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    for _ in range(LEVELS_AROUND):
        sent = [sent]
    to_json(sent)  # not where it is too deep for that, or an escape stands for half a character
    return value


def tolerate_deep_arguments() -> None:
    """Let Verifiers tell turns apart by them as they are, as it does by whatever else is no JSON."""
    internals: Any = graph
    canonical = internals._canonical_tool_arguments

    def tolerant(arguments: str) -> str:
        try:
            return str(canonical(arguments))
        except RecursionError:
            return arguments

    internals._canonical_tool_arguments = tolerant
