"""Stop strings: what ends a completion by its text, and where the text ends then.

1. A stop string ends a completion as soon as its text contains it: the earliest where there are several.
2. Not where it ends within the first `min_tokens` tokens: there it is text as any other, and ends nothing
   later either.
3. What a whole text is cut at, and what is held back of a growing one, is the same place.
4. They are looked for in the text that is told: special tokens that are no part of it part no stop string,
   and those that are may be in one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from quartet_inference.engine import Sampling
from quartet_inference.text_stream import HALF, Detokenize, TextStream


@dataclass(frozen=True)
class Stops:
    """Those of a request."""

    strings: Sequence[str]
    min_tokens: int = 0
    untold: Collection[int] = ()  # tokens that are no part of the text


def find(text: str, stop: str, unheeded: int) -> int:
    """Where it begins, the first one that ends behind so many characters; -1: nowhere."""
    return text.find(stop, max(0, unheeded - len(stop) + 1))


def before(text: str, stop: str, first: str) -> str:
    """The text up to the stop string that ended it; `first` is the text of its first `min_tokens` tokens."""
    at = find(text, stop, len(first.rstrip(HALF)))
    return text if at < 0 else text[:at]


class StopWatch:
    """Looks for stop strings in the text of a growing completion."""

    def __init__(self, stops: Stops, detokenize: Detokenize) -> None:
        self._stops = stops.strings
        self._unheeded = stops.min_tokens
        self._untold = stops.untold
        self._text = TextStream(detokenize)
        self._reach = max(len(stop) for stop in self._stops) - 1
        self._tail = ""

    def feed(self, token: int) -> str | None:
        """The stop string that the text contains now, the earliest if there are several."""
        before = len(self._tail)
        window = self._tail + self._text.feed([] if token in self._untold else [token])
        self._tail = window[-self._reach :] if self._reach else ""
        if self._unheeded:
            self._unheeded -= 1
            return None
        found = [(at, stop) for stop in self._stops if (at := find(window, stop, before)) >= 0]
        return min(found)[1] if found else None


def watch(sampling: Sampling, detokenize: Detokenize) -> StopWatch | None:
    """What looks for a completion's stop strings; None: it has none. `detokenize` leaves no token out."""
    stops = Stops(sampling.stop, sampling.min_tokens, sampling.untold)
    return StopWatch(stops, detokenize) if stops.strings else None
