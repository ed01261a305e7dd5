"""What a reward function answered: one number for each completion, or None where it has nothing to say.

1. Taken is whatever gives numbers one by one: a list, an array or a tensor of one dimension, a generator; a
   number is whatever float() makes one of, but text.
2. Anything else, another count, and what is not finite are refused: a WrongAnswer says which completion
   it is, what stands there and what is right.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, Final

from quartet.counted import counted

#: Of what functions answer and log; text is one in no sense that float() has of it.
TEXT: Final = (str, bytes, bytearray)


class WrongAnswer(ValueError):
    """It is none."""


def values_of(answer: Any, completions: int) -> list[float | None]:
    """Raises WrongAnswer, and what a generator raises."""
    if isinstance(answer, (*TEXT, Mapping)):
        raise WrongAnswer(_refusal(answer, completions))
    try:
        given = iter(answer)
    except TypeError:
        raise WrongAnswer(_refusal(answer, completions)) from None
    values = list(given)
    if len(values) != completions:
        raise WrongAnswer(
            f"it answered {counted(len(values), 'number')} for {counted(completions, 'completion')}; return "
            "one for each, or None where it has nothing to say"
        )
    return [_value(number, value) for number, value in enumerate(values)]


def number_of(value: Any) -> float:
    """Raises TypeError or ValueError where it is none."""
    if isinstance(value, TEXT):
        raise TypeError(f"{reprlib.repr(value)} is text, and no number")
    return float(value)


def _value(number: int, value: Any) -> float | None:
    if value is None:
        return None
    try:
        found = number_of(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of a tensor of several
        raise WrongAnswer(
            f"of completion {number} it answered {reprlib.repr(value)}; return a number, or None where it "
            "has nothing to say"
        ) from None
    if not math.isfinite(found):
        raise WrongAnswer(
            f"of completion {number} it answered {found}; return a finite number, or None where it has "
            "nothing to say"
        )
    return found


def _refusal(answer: Any, completions: int) -> str:
    return (
        f"it answered {reprlib.repr(answer)}; return a list of {counted(completions, 'number')}, one for "
        "each completion, or None where it has nothing to say"
    )
