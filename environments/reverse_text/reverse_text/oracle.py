"""The right answer, for `quartet env check reverse-text`."""

from __future__ import annotations

from typing import Any


def answer(task: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """The whole answer."""
    return f"<reversed_text>{task['answer']}</reversed_text>"
