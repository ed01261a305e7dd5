"""The length that a text has at least: never more than it has, for every kind of tokenizer."""

from __future__ import annotations

import random
import sys
import time
import unicodedata
from pathlib import Path

import pytest
from quartet.errors import QuartetError
from quartet_inference.chat import Chat
from quartet_inference.chat.lengths import MOST_COMPOSED, Longest, check_length, longest

from .tokenizer_kinds import BOUNDED, UNBOUNDED, WORDS, byte_level


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_text_has_fewer_tokens_than_it_is_said_to_have_at_least(kind: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    tokenizer = BOUNDED[kind]()
    bound = longest(tokenizer)
    assert bound is not None
    for word in [*WORDS, *(rng.choice(WORDS) + rng.choice(WORDS) for _ in range(60))]:
        text = word * rng.randint(1, 300)
        tokens = len(tokenizer.encode(text, add_special_tokens=False))
        check_length(text, bound, max(tokens, 1))
    with pytest.raises(QuartetError) as long:
        check_length("ab" * bound.visible * 50, bound, 99)
    assert (long.value.reason, long.value.metadata["tokens"]) == ("PROMPT_TOO_LONG", "100")


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_where_any_text_may_be_short_nothing_is_refused(kind: str) -> None:
    assert longest(UNBOUNDED[kind]()) is None


def test_white_space_counts_unless_a_special_token_swallows_it() -> None:
    counted, swallowed = longest(byte_level()), longest(byte_level(lstrip=True))
    assert isinstance(counted, Longest) and isinstance(swallowed, Longest)
    assert counted.all is not None and swallowed.all is None
    blank = " " * (counted.all * 100 + 1)
    with pytest.raises(QuartetError, match="at least 101 tokens"):
        check_length(blank, counted, 100)
    check_length(blank, swallowed, 100)
    assert len(byte_level(lstrip=True).encode(f"{blank}<|end|>", add_special_tokens=False)) == 1


def test_composed_characters_come_from_at_most_so_many() -> None:
    parts = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(sys.maxunicode + 1))
    assert parts == MOST_COMPOSED


@pytest.mark.parametrize("word", ["so ", "   ", "\n\t "])
def test_megabytes_that_cannot_fit_are_refused_before_they_are_tokenized(
    model_folder: Path, word: str
) -> None:
    chat = Chat(model_folder)
    text = word * (1 << 20)
    began = time.process_time()
    for refused in (
        lambda: chat.encode(text, room=256),
        lambda: chat.render([{"role": "user", "content": text}], [], 256),
        lambda: chat.extend([1, 2], [{"role": "user", "content": text}], [], 256),
    ):
        with pytest.raises(QuartetError, match=r"at least \d+ tokens, at most 255 leave room") as long:
            refused()
        assert long.value.reason == "PROMPT_TOO_LONG"
    spent = time.process_time() - began
    began = time.process_time()
    chat.encode(text)
    assert spent < (time.process_time() - began) / 2, "three refusals cost less than half of one tokenizing"
