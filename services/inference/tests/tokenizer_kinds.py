"""Tokenizers of the kinds that models have, and words that each of them treats in its own way."""

from __future__ import annotations

from typing import Any

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
