"""The text of tokens that come one after another.

1. What is told is whole characters, each once, in order, however many tokens come at a time.
2. What a feed costs does not grow with the text before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Tokens after which half a character is told as it is: no character is so long.
MAX_HALF_TOKENS = 16
#: Tokens that a character is made of, at most: its bytes.
MAX_CHARACTER_TOKENS = 4
#: Half a character reads so.
HALF = "\ufffd"

Detokenize = Callable[[Sequence[int]], str]


class TextStream:
    """One growing text."""

    def __init__(self, detokenize: Detokenize) -> None:
        """Of these tokens' texts."""
        self._detokenize = detokenize
        self._tokens: list[int] = []  # the last that were told, and those that were not
        self._count = 0  # of the former
        self._told = ""  # their text

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these add, up to the last whole character."""
        self._tokens.extend(tokens)
        end, text = self._whole()
        added = text[len(self._told) :]
        # The last character stays: some decoders treat the first token of a text in a special way, and some
        # read bytes that stand side by side together or not at all.
        start, self._told = self._last_character(end)
        self._tokens, self._count = self._tokens[start:], end - start
        return added

    def _whole(self) -> tuple[int, str]:
        """How many of the tokens end with a whole character, and their text."""
        most = len(self._tokens)
        for end in range(most, max(self._count, most - MAX_HALF_TOKENS), -1):
            text = self._detokenize(self._tokens[:end])
            if not text.endswith(HALF):
                return end, text
        if most - self._count < MAX_HALF_TOKENS:
            return self._count, self._told
        return most, self._detokenize(self._tokens)

    def _last_character(self, end: int) -> tuple[int, str]:
        """Where the last tokens begin that are a text by themselves, and that text."""
        for start in range(end - 1, max(-1, end - 1 - MAX_CHARACTER_TOKENS), -1):
            text = self._detokenize(self._tokens[start:end])
            if text and HALF not in text:
                return start, text
        start = max(0, end - 1)
        return start, self._detokenize(self._tokens[start:end])
