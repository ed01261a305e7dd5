"""The text of tokens that come one after another.

1. What is told is whole characters, each once, in order.
2. What a feed costs does not grow with the text before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Tokens after which half a character is told as it is: no character is so long.
MAX_HALF_TOKENS = 16

Detokenize = Callable[[Sequence[int]], str]


class TextStream:
    """One growing text."""

    def __init__(self, detokenize: Detokenize) -> None:
        """Of these tokens' texts."""
        self._detokenize = detokenize
        self._tokens: list[int] = []  # from the last place where the text was whole
        self._told = ""  # text of those that were told

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these add, up to the last whole character."""
        self._tokens.extend(tokens)
        text = self._detokenize(self._tokens)
        if text.endswith("\ufffd") and len(self._tokens) < len(tokens) + MAX_HALF_TOKENS:
            return ""
        added = text[len(self._told) :]
        # The last token stays: some decoders treat the first token of a text in a special way.
        self._tokens = self._tokens[-1:]
        self._told = self._detokenize(self._tokens)
        return added
