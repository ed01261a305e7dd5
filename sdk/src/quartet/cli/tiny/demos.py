"""Demonstrations of reversing text, for supervised training, and the reward that measures the result.

1. `Reversals` is a deterministic stream of examples: equal seeds give equal demonstrations.
2. `reward` agrees with the reverse-text environment: the likeness of the answer to the reversed text, and 0
   for anything but one answer in its tags followed by the end of the turn. (Without the clean end, a policy
   under training learns to append junk.)
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from difflib import SequenceMatcher

from quartet.cli.tiny.files import CLOSE_TAG, OPEN_TAG, REVERSE_PROMPT

SHORTEST, LONGEST = 4, 8
MAX_TOKENS = LONGEST + 5  # two tags, the end token, and room for two letters too many


@dataclass(frozen=True)
class Example:
    """One text to reverse."""

    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far."""
        return [{"role": "system", "content": REVERSE_PROMPT}, {"role": "user", "content": self.text}]


class Reversals:
    """Random texts of 4 to 8 lower-case letters, with answers of which a share is the unreversed text."""

    def __init__(self, seed: int, echo_share: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._echo_share = echo_share

    def example(self) -> Example:
        """The next text."""
        letters = self._random.randint(SHORTEST, LONGEST)
        return Example("".join(self._random.choice(string.ascii_lowercase) for _ in range(letters)))

    def demonstration(self) -> tuple[Example, str]:
        """The next text with an answer."""
        example = self.example()
        echo = self._random.random() < self._echo_share
        answer = example.text if echo else example.text[::-1]
        return example, f"{OPEN_TAG}{answer}{CLOSE_TAG}"


def reward(text: str, answer: str, ended: bool) -> float:
    """Likeness of the answer to the reversed text, in [0, 1]."""
    if not ended or not answer.startswith(OPEN_TAG) or not answer.endswith(CLOSE_TAG):
        return 0.0
    inner = answer[len(OPEN_TAG) : -len(CLOSE_TAG)]
    if OPEN_TAG in inner or CLOSE_TAG in inner:
        return 0.0
    return SequenceMatcher(None, inner, text[::-1], autojunk=False).ratio()
