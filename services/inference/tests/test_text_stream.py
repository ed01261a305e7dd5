"""Text of tokens that come one after another: whole characters, whatever tokens they are made of; and the
stop strings in it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from quartet_inference.stop_strings import Stops, StopWatch, before
from quartet_inference.text_stream import MAX_HALF_TOKENS, TOGETHER_TOKENS, TextStream
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE


def test_texts_grow_by_whole_characters_and_a_feed_costs_no_more_for_what_was_before() -> None:
    longest = 0

    def decode(tokens: Any) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return bytes(tokens).decode(errors="replace")

    stream = TextStream(decode)
    assert [stream.feed([byte]) for byte in "aß€".encode()] == ["a", "", "ß", "", "", "€"]
    assert "".join(stream.feed([byte]) for byte in "\ufffd é".encode() * 50)
    assert "".join(stream.feed([0xE2]) for _ in range(500)), "half characters without an end are told too"
    assert longest <= MAX_HALF_TOKENS + 2


def by_bytes(tokens: Any) -> str:
    return bytes(tokens).decode(errors="replace")


def by_byte_fallback() -> Any:
    """As tokenizers of Llama and Gemma do: bytes that stand side by side are read together or not at all."""
    tokenizer = Tokenizer(BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer.decode


@pytest.mark.parametrize("decode", [by_bytes, by_byte_fallback()], ids=["byte-level", "byte fallback"])
@pytest.mark.parametrize("at_a_time", [1, 7, 32])
def test_texts_grow_by_whole_characters_however_many_tokens_come_at_a_time(
    decode: Any, at_a_time: int
) -> None:
    """Of which no token is a character."""
    text = "日本語の🤖🤖 a 文é🤖" * 20
    tokens = list(text.encode())
    stream, told = TextStream(decode), ""
    for start in range(0, len(tokens), at_a_time):
        told += stream.feed(tokens[start : start + at_a_time])
        assert text.startswith(told), told
    assert told == decode(tokens) == text


def by_words(tokens: Any) -> str:
    """As tokenizers of Llama 2 do: the space before the first word of a text is left out."""
    return "".join(f" {'abc'[token % 3] * (token % 4)}" for token in tokens)[1:]


@pytest.mark.parametrize(
    "decode", [by_bytes, by_byte_fallback(), by_words], ids=["byte-level", "byte fallback", "words"]
)
def test_tokens_together_add_what_they_add_one_by_one(decode: Any) -> None:
    """text_stream.py 1: however they come, and whatever half characters are among them."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(100):
        tokens: list[int] = []
        while len(tokens) < 5 * TOGETHER_TOKENS:
            some = chance.choice(["plain text, ", "é", "日本", "🤖", "\ufffd"]).encode()
            tokens += chance.choice([some, some[:-1], some[1:], [0xE2] * chance.randrange(30)])
        one_by_one, together = TextStream(decode), TextStream(decode)
        expected = [one_by_one.feed([token]) for token in tokens]
        told: list[str] = []
        while len(told) < len(tokens):
            some = tokens[len(told) : len(told) + chance.randrange(1, 3 * TOGETHER_TOKENS)]
            told += together.feed_each(some, lambda token: decode([token]))
        assert told == expected


def test_tokens_of_plain_text_are_looked_at_together() -> None:
    """text_stream.py 2: a token of a thousand costs a part of a decoding; half a character two at most."""
    decoded = 0

    def decode(tokens: Any) -> str:
        nonlocal decoded
        decoded += 1
        return by_bytes(tokens)

    texts = TextStream(decode).feed_each(b"plain text" * 100, chr)
    assert "".join(texts) == "plain text" * 100 and decoded < 1000 / 4
    decoded = 0
    assert "".join(TextStream(decode).feed_each([0xE2] * 1000, lambda token: by_bytes([token])))
    assert decoded < 2 * 1000


def test_stop_strings_are_found_across_tokens_and_characters() -> None:
    def decode(tokens: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    for text, stops, found_at in (
        ("hello world", ("lo w",), 7),
        ("grüße dich", ("ße",), 7),
        ("aaab", ("aab", "ab"), 4),
        ("nothing", ("x", "thingy"), None),
        ("x", ("x",), 1),
    ):
        watch = StopWatch(Stops(stops), decode)
        hits = [i + 1 for i, byte in enumerate(text.encode()) if watch.feed(byte)]
        assert (hits[0] if hits else None) == found_at, text


def test_a_stop_string_is_found_behind_a_character_of_several_bytes() -> None:
    watch = StopWatch(Stops(("🤖b",)), by_byte_fallback())
    hits = [watch.feed(byte) for byte in "日🤖🤖b".encode()]
    assert hits[:-1] == [None] * (len(hits) - 1) and hits[-1] == "🤖b"


def test_the_earliest_of_several_stop_strings_ends_a_completion_and_little_is_looked_through() -> None:
    """stop_strings.py 1."""
    watch = StopWatch(
        Stops(("y", "a")), lambda tokens: "".join("bcd" if token else "xay" for token in tokens)
    )
    assert [watch.feed(token) for token in (1, 1, 0)] == [None, None, "a"]
    for stops in (("y",), ("yz", "y"), ("xyz",)):
        watch = StopWatch(Stops(stops), lambda tokens: "b" * len(tokens))
        assert not any(watch.feed(1) for _ in range(50))
        assert len(watch._tail) == max(map(len, stops)) - 1


def test_stop_strings_in_the_first_tokens_end_nothing_and_none_behind_is_missed() -> None:
    """stop_strings.py 2, 3, by all texts of three letters: judged from the whole text."""
    stops, letters = ("ab", "b", "caa"), "abc"
    for number in range(3**7):
        text = "".join(letters[number // 3**place % 3] for place in range(7))
        for least in (0, 1, 3):
            watch = StopWatch(Stops(stops, least), by_bytes)
            hits = [watch.feed(byte) for byte in text.encode()]
            ended = next((at for at, hit in enumerate(hits) if hit), None)
            ends = [at for at in range(least, 7) if text[: at + 1].endswith(stops)]
            assert ended == (ends[0] if ends else None), (text, least)
            if ended is None:
                continue
            stop = hits[ended]
            assert stop is not None
            cut = before(text[: ended + 1], stop, text[:least])
            assert cut + stop == text[: ended + 1], (text, least)
    tokens = "aé é".encode()
    for least, ended, cut in ((2, 2, "a"), (3, 5, "aé ")):  # behind half of the first é, and behind all of it
        watch = StopWatch(Stops(("é",), least), by_bytes)
        hits = [watch.feed(byte) for byte in tokens]
        assert hits.index("é") == ended
        assert before(by_bytes(tokens[: ended + 1]), "é", by_bytes(tokens[:least])) == cut
