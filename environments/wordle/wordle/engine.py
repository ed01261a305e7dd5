"""The game: what a guess tells about the secret word.

1. A letter is G where it stands in its place, Y where it stands elsewhere, X where it does not. A letter is
   coloured as often as the secret has it: greens first, then from the left.
2. A guess counts if it is five letters of a to z. Other guesses cost a turn and tell nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from importlib import resources

LETTERS = 5
_WORD = re.compile(rf"[a-z]{{{LETTERS}}}")


def words() -> list[str]:
    """The words that secrets are drawn from, in alphabetical order."""
    return resources.files(__package__).joinpath("words.txt").read_text(encoding="utf-8").split()


def colours(guess: str, secret: str) -> str:
    """One of G, Y and X for each letter of the guess."""
    shown = ["G" if a == b else "X" for a, b in zip(guess, secret, strict=True)]
    left = Counter(b for colour, b in zip(shown, secret, strict=True) if colour == "X")
    for at, letter in enumerate(guess):
        if shown[at] == "X" and left[letter]:
            left[letter] -= 1
            shown[at] = "Y"
    return "".join(shown)


@dataclass
class Game:
    """One game."""

    secret: str
    max_guesses: int
    guesses: list[str] = field(default_factory=list)
    """All of them, the empty string for one that did not count."""

    @property
    def won(self) -> bool:
        """Whether the last guess was the secret."""
        return bool(self.guesses) and self.guesses[-1] == self.secret

    @property
    def over(self) -> bool:
        """Whether no guess is left, or none is needed."""
        return self.won or len(self.guesses) >= self.max_guesses

    def guess(self, text: str) -> str:
        """Take a guess; the answer to the player."""
        word = text.strip().strip("[]").strip().lower()
        counts = _WORD.fullmatch(word) is not None
        self.guesses.append(word if counts else "")
        left = self.max_guesses - len(self.guesses)
        if self.won:
            return f"You guessed it in {len(self.guesses)}."
        if counts:
            told = f"{' '.join(word.upper())}\n{' '.join(colours(word, self.secret))}"
        else:
            told = f"A guess is {LETTERS} letters of a to z."
        if self.over:
            return f"{told}\n\nThe word was {self.secret}."
        return f"{told}\n\nYou have {left} {'guess' if left == 1 else 'guesses'} left."

    def nearness(self) -> float:
        """0.2 for each green and 0.1 for each yellow letter of the last guess that counted."""
        last = next((guess for guess in reversed(self.guesses) if guess), None)
        if last is None:
            return 0.0
        shown = colours(last, self.secret)
        return 0.2 * shown.count("G") + 0.1 * shown.count("Y")
