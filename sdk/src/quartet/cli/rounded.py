"""Numbers as a person reads them: of so many digits, but with all of those before the point. A day is 86400
seconds and not 8.64e+04, and of 12345 rollouts none is lost."""

from __future__ import annotations

from typing import Final

#: Nobody counts the digits of larger ones.
LARGEST: Final = 1e12


def rounded(value: float, digits: int = 4) -> str:
    """A number in a text."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < LARGEST else text
