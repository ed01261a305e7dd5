"""What an answer in plain words says.

1. A name stands in a text where its words do, together and in order; case, articles and punctuation aside.
2. An answer says the expected one where it stands there without a "not" before it, and nothing else of its
   kind does: whoever names two towns has not said which. What the question itself names may be repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

Words = tuple[str, ...]
_ARTICLES = {"the", "a", "an"}
_NOT = {"not", "cannot", "never", "neither", "nor", "t"}  # the last is what is left of "isn't"
_BETWEEN = {"be", "in", "on", "by", "at", "town", "of", "river", "season", "year"}  # "not in the town of"


def word_count(text: str) -> int:
    """How many words, however they are separated: a list with nothing but commas between is no single one."""
    return len(re.findall(r"\w+", text))


def words_of(text: str) -> Words:
    """The words that are compared."""
    return tuple(word for word in re.findall(r"\w+", text.lower()) if word not in _ARTICLES)


def kin_of(answers: Iterable[str]) -> frozenset[Words]:
    """The things of one kind, as `says` looks for them."""
    return frozenset(filter(None, map(words_of, answers)))


def contains(text: str, answer: str) -> bool:
    """Whether the answer's words stand in the text."""
    wanted = words_of(answer)
    return bool(wanted) and any(True for _ in _places(words_of(text), wanted))


def says(text: str, answer: str, question: str, kin: frozenset[Words]) -> bool:
    """Whether the text gives that answer to the question, and nothing else of its kin."""
    given, wanted = words_of(text), words_of(answer)
    if not wanted or all(_denied(given, at) for at in _places(given, wanted)):
        return False
    lengths = {len(one) for one in kin}
    named, asked, right = (_named(words, lengths) for words in (given, words_of(question), wanted))
    return not (named & kin) - asked - right


def _places(given: Words, wanted: Words) -> Iterable[int]:
    size = len(wanted)
    return (at for at in range(len(given) - size + 1) if given[at : at + size] == wanted)


def _denied(given: Words, at: int) -> bool:
    before = [word for word in given[:at] if word not in _BETWEEN]
    return bool(before) and before[-1] in _NOT


def _named(words: Words, lengths: Iterable[int]) -> set[Words]:
    return {words[at : at + size] for size in lengths for at in range(len(words) - size + 1)}
