"""The right answer, for `quartet env check gsm8k`."""

from __future__ import annotations

from typing import Any


def answer(task: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """The whole answer."""
    return f"So \\boxed{{{task['answer']}}}"
