"""Whether a final answer is the expected one.

1. The answer stands in the last \\boxed{...}; without one there is no answer.
2. Numbers are compared by value: 1/2, \\frac{1}{2}, 0.5 and 50\\% are one number, and so are 1,000 and 1000.
3. Anything else is compared as text, without spaces, dollars and the commands that only change its looks.
   Nothing is evaluated, so no answer can take long.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

MAX_CHARS = 200
_LOOKS = re.compile(r"\\left|\\right|\\displaystyle|\\[,;:! $]|\\text\s*|\\mathrm\s*|[\s$]")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)")
_RATIO = re.compile(r"(-?\d+)/(\d+)")


def same_answer(given: str, expected: str) -> bool:
    """Whether both say the same."""
    if not given.strip() or len(given) > MAX_CHARS:
        return False
    left, right = value_of(given), value_of(expected)
    if left is not None and right is not None:
        return left == right
    return _plain(given) == _plain(expected)


def value_of(text: str) -> Fraction | None:
    """The number that a text is, or None."""
    plain = _plain(text)
    percent = plain.endswith("\\%") or plain.endswith("%")
    plain = plain.removesuffix("%").removesuffix("\\").removesuffix(".")
    plain = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", plain)
    if fraction := _FRACTION.fullmatch(plain):  # behind a number it is added to it, or multiplied with it
        plain = fraction.expand(r"\1\2/\3")
    if (ratio := _RATIO.fullmatch(plain)) and int(ratio[2]):
        value = Fraction(int(ratio[1]), int(ratio[2]))
    elif _NUMBER.fullmatch(plain):
        value = Fraction(Decimal(plain))
    else:
        return None
    return value / 100 if percent else value


def _plain(text: str) -> str:
    plain = _LOOKS.sub("", text)
    return plain[1:-1] if plain.startswith("{") and plain.endswith("}") else plain
