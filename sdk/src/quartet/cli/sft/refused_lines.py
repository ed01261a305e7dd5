"""The lines of data files that are refused, as a person is told of them.

1. Lines that are refused for one reason are told once, with the places of the first MAX_PLACES; those that
   are too long likewise, with the tokens of each.
2. Of all reasons the first MAX_TOLD are told, and the lines that have others are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quartet.config.refusals import ALSO

#: More are not read at once.
MAX_TOLD = 20
MAX_PLACES = 3


class TooLong(ValueError):
    """A line has more tokens than it may have."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"it has {tokens} tokens")
        self.tokens = tokens


@dataclass
class Places:
    """Lines that have something in common."""

    first: list[str] = field(default_factory=list)
    count: int = 0

    def put(self, place: str) -> None:
        self.count += 1
        if len(self.first) < MAX_PLACES:
            self.first.append(place)

    def __str__(self) -> str:
        more = self.count - len(self.first)
        return ", ".join(self.first) + (f" and {more} more" if more else "")


@dataclass
class RefusedLines:
    """Those of the files that a key names."""

    _by_reason: dict[str, Places] = field(default_factory=dict)
    _too_long: Places = field(default_factory=Places)
    #: Tokens of the longest.
    _longest: int = 0
    #: Lines that have other reasons.
    _more: int = 0

    def put(self, place: str, why: ValueError) -> None:
        """One more."""
        if isinstance(why, TooLong):
            self._too_long.put(f"{place} ({why.tokens})")
            self._longest = max(self._longest, why.tokens)
        elif (places := self._by_reason.get(str(why))) is not None:
            places.put(place)
        elif len(self._by_reason) < MAX_TOLD:
            self._by_reason[str(why)] = Places()
            self._by_reason[str(why)].put(place)
        else:
            self._more += 1

    def told(self, file: str, thing: str, max_tokens: int) -> str:
        """All of them; empty where there are none. `file` stands before the first, `thing` is what a line
        has."""
        told = [f"{places}: {why}" for why, places in self._by_reason.items()]
        if many := self._too_long.count:
            has, it = (f"1 {thing} has", "it") if many == 1 else (f"{many} {thing}s have", "them")
            longest = "" if many == 1 else f" (the longest has {self._longest})"
            told.append(
                f"{has} more than max_tokens = {max_tokens} tokens: {self._too_long}; shorten {it}, set "
                f'max_tokens to more{longest}, or set overlong to "leave_out" or "cut"'
            )
        more = f"\n  and {self._more} more" if self._more else ""
        return file + ALSO.join(told) + more if told else ""
