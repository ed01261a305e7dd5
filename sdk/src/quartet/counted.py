"""How many there are of a thing, in words: "1 step", "2 steps"."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """`thing` is one of them, whose plural ends with an s."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
