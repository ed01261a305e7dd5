"""The length that a text has at least: never more than it has, for every kind of tokenizer."""

from __future__ import annotations

import random
import sys
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet_inference.chat import Chat
from quartet_inference.chat.lengths import MOST_COMPOSED, check_length, longest_token
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = [
    "the ",
    "  \n\n",
    "a" * 30,
    "été ",
    "e\u0301",
    "\u1100\u1161\u11a8",
    "日本",
    "🙂",
    "<|end|>",
    "\t",
    "=",
]


def made(tokenizer: Tokenizer, **special: Any) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, **special)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(["the the the " + "a" * 30 + " ==========="] * 20, trainer)
    return tokenizer


def byte_level(normalizer: Any = None, split: Any = None, **special: Any) -> PreTrainedTokenizerFast:
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    parts = {"pre_tokenizer": bytes_ if split is None else pre_tokenizers.Sequence([split, bytes_])}
    if normalizer is not None:
        parts["normalizer"] = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    return made(trained(models.BPE(), trainer, **parts), **special)


def byte_fallback() -> PreTrainedTokenizerFast:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "aa": 258, "▁a": 259}
    model = models.BPE(vocab=vocabulary, merges=[("a", "a"), ("▁", "a")], byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    return made(tokenizer)


def removing() -> PreTrainedTokenizerFast:
    return byte_level(split=pre_tokenizers.Split(Regex("a+"), behavior="removed"))


BOUNDED = {
    "gpt2": byte_level,
    "qwen": lambda: byte_level(normalizers.NFC(), pre_tokenizers.Split(Regex(r"\p{L}+|\s+"), "isolated")),
    "phi": lambda: byte_level(lstrip=True, rstrip=True),
    "llama2": byte_fallback,
}
UNBOUNDED = {
    "removing": removing,
    "bert's normalizer": lambda: byte_level(normalizers.BertNormalizer()),
    "stripped accents": lambda: byte_level(
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    ),
    "shortening": lambda: byte_level(normalizers.Replace(Regex("a+"), "a")),
    "wordpiece": lambda: made(
        trained(
            models.WordPiece(unk_token="?"),
            trainers.WordPieceTrainer(vocab_size=60, special_tokens=["?"], show_progress=False),
            pre_tokenizer=pre_tokenizers.Whitespace(),
        )
    ),
    "no bytes": lambda: made(trained(models.BPE(), trainers.BpeTrainer(vocab_size=60, show_progress=False))),
}


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_text_has_fewer_tokens_than_it_is_said_to_have_at_least(kind: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    tokenizer = BOUNDED[kind]()
    longest = longest_token(tokenizer)
    assert longest is not None
    for word in [*WORDS, *(rng.choice(WORDS) + rng.choice(WORDS) for _ in range(60))]:
        text = word * rng.randint(1, 300)
        tokens = len(tokenizer.encode(text, add_special_tokens=False))
        check_length(text, longest, max(tokens, 1))
    with pytest.raises(QuartetError) as long:
        check_length("ab" * longest * 50, longest, 99)
    assert (long.value.reason, long.value.metadata["tokens"]) == ("PROMPT_TOO_LONG", "100")


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_where_any_text_may_be_short_nothing_is_refused(kind: str) -> None:
    assert longest_token(UNBOUNDED[kind]()) is None


def test_composed_characters_come_from_at_most_so_many() -> None:
    parts = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(sys.maxunicode + 1))
    assert parts == MOST_COMPOSED


def test_megabytes_that_cannot_fit_are_refused_before_they_are_tokenized(model_folder: Path) -> None:
    chat = Chat(model_folder)
    text = "so " * (1 << 20)
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
