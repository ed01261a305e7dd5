"""The right answer, for `quartet env check math-python`, after two calls that show that the session lasts."""

from __future__ import annotations

from typing import Any


def answer(task: dict[str, Any], messages: list[dict[str, Any]]) -> str | dict[str, Any]:
    """A call that keeps a value, one that reads it, the answer."""
    turn = sum(one["role"] == "assistant" for one in messages)
    if turn < 2:
        code = "x" if turn else "x = 6 * 7"
        return {"content": "", "tool_calls": [{"name": "python", "arguments": {"code": code}}]}
    if (last := messages[-1]["content"]) != "42":
        raise ValueError(f"the session does not remember: {last!r}")
    return f"\\boxed{{{task['answer']}}}"
