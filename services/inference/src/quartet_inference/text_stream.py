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
#: Tokens whose texts are looked at together: those around half a character are looked at one by one.
TOGETHER_TOKENS = 16
#: Half a character reads so.
HALF = "\ufffd"

Detokenize = Callable[[Sequence[int]], str]
#: The text of one token, alone.
TokenText = Callable[[int], str]


class TextStream:
    """One growing text."""

    def __init__(self, detokenize: Detokenize) -> None:
        """Of these tokens' texts."""
        self._detokenize = detokenize
        self._tokens: list[int] = []  # the last that were told, and those that were not
        self._count = 0  # of the former
        self._told = ""  # their text
        self._halves = 0  # so many of the tokens, and fewer, end with half a character

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these add, up to the last whole character."""
        self._tokens.extend(tokens)
        end, text = self._whole()
        if end == self._count:
            self._halves = len(self._tokens)
            return ""
        added = text[len(self._told) :]
        # The last character stays: some decoders treat the first token of a text in a special way, and some
        # read bytes that stand side by side together or not at all.
        start, self._told = self._last_character(end)
        self._tokens, self._count, self._halves = self._tokens[start:], end - start, 0
        return added

    def feed_each(self, tokens: Sequence[int], alone: TokenText) -> list[str]:
        """What each of these adds, as if they were fed one after the other; `alone` says its text alone."""
        texts: list[str] = []
        for start in range(0, len(tokens), TOGETHER_TOKENS):
            some = tokens[start : start + TOGETHER_TOKENS]
            texts += self._side_by_side(some, alone) or [self.feed([token]) for token in some]
        return texts

    def _side_by_side(self, tokens: Sequence[int], alone: TokenText) -> list[str]:
        """The texts of these, which are fed, if their text is those in a row, as it mostly is: to see that
        takes a few decodings, not some for each. Else nothing, and nothing is fed."""
        held = self._tokens[:], self._count, self._told, self._halves
        texts = [alone(token) for token in tokens]
        text = "".join(texts)
        if HALF not in text and self.feed(tokens) == text:
            return texts
        self._tokens, self._count, self._told, self._halves = held
        return []

    def _whole(self) -> tuple[int, str]:
        """How many of the tokens end with a whole character, and their text."""
        most = len(self._tokens)
        for end in range(most, max(self._count, self._halves, most - MAX_HALF_TOKENS), -1):
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
