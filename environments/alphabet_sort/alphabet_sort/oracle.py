"""The right answers, for `quartet env check alphabet-sort`."""

from __future__ import annotations

from typing import Any


def answer(task: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """The list of this turn."""
    turn = sum(one["role"] == "assistant" for one in messages)
    tag = "alphabetical_sorted" if turn == 0 else "combined_alphabetical_sorted"
    return "\n".join([f"<{tag}>", *task["ground_truths"][turn], f"</{tag}>"])
