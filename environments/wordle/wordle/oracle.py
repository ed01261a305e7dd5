"""The right guess, for `quartet env check wordle`, after one that breaks the format."""

from __future__ import annotations

from typing import Any

#: Solved at the second guess, in the format.
FULL_REWARD = 1.7


def answer(task: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """A guess without its brackets, then the word."""
    first = all(one["role"] != "assistant" for one in messages)
    return "<guess>zzzzz</guess>" if first else f"<guess>[{task['answer']}]</guess>"
