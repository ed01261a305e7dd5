"""The bytes of every token of a tokenizer, for whoever compares them with a grammar, or tells them.

1. A token's bytes are those that decoding it adds to a text, exactly; halves of characters stay halves.
2. Special tokens and end tokens are no text: a grammar allows them only where it names them, an end token
   only where the structure is complete.
3. Known are the two kinds of tokenizers that models are made with: byte-level BPE, and BPE with byte
   fallback. Another is refused (NOT_IMPLEMENTED), because its texts do not say their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from quartet.errors import QuartetError
from transformers import PreTrainedTokenizerBase, TokenizersBackend

_SPACE = "▁"
# Decoders of vocabularies that write the bytes of a token.
_SPELLED = {"ByteLevel", "ByteFallback"}


class _Tokens:
    """A tokenizer as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, backend: Any, tokens: list[bytes], special: set[int], end_token: int) -> None:
        self._backend = backend
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self.eos_token_id = end_token

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that a grammar leaves no choice about. Raises TypeError for bytes."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)


def ll_tokenizer(tokenizer: PreTrainedTokenizerBase, end_tokens: Collection[int]) -> LLTokenizer:
    """The tokenizer for llguidance; takes a second for a large one. Errors: NOT_IMPLEMENTED."""
    why = unfollowed(tokenizer, end_tokens)
    if why:
        raise unsupported(why)
    tokens, special = _bytes_of(tokenizer.backend_tokenizer)
    ends = sorted(end_tokens)
    if ends[-1] >= len(tokens):
        tokens += [b""] * (ends[-1] + 1 - len(tokens))
    special.update(ends)
    for end in ends:
        tokens[end] = tokens[end] or b"end"  # a special token's bytes are a name
    wrapper = TokenizerWrapper(_Tokens(tokenizer.backend_tokenizer, tokens, special, ends[0]))
    return LLTokenizer(wrapper, eos_token=ends)


def unfollowed(tokenizer: PreTrainedTokenizerBase, end_tokens: Collection[int]) -> str:
    """Why no grammar can be followed by this tokenizer's tokens, which is told at once; empty: it can."""
    if not isinstance(tokenizer, TokenizersBackend):
        return f"its tokenizer is a {type(tokenizer).__name__}, which is none of the tokenizers library"
    if not end_tokens:
        return "it has no end token, by which a structure could end"
    kinds = _kinds(tokenizer.backend_tokenizer)
    if not kinds & _SPELLED:
        return f"its tokenizer decodes by {', '.join(sorted(kinds)) or 'no decoder'}"
    return ""


def unsupported(why: str) -> QuartetError:
    """The error of a model for which no structure can be enforced."""
    return QuartetError(
        "NOT_IMPLEMENTED",
        f"structure cannot be enforced for this model: {why}",
        field="structure",
        remedy="leave it out, or serve a model with a byte-level or a byte-fallback BPE",
    )


def bytes_of_text(tokenizer: PreTrainedTokenizerBase) -> Callable[[int, str], bytes]:
    """Gives the bytes of a token that alone has this text: as the vocabulary writes it, with the space before
    a word that its text alone may lack; of the text where only that is known."""
    if not isinstance(tokenizer, TokenizersBackend):
        return lambda token, text: text.encode()
    backend = tokenizer.backend_tokenizer
    if not _kinds(backend) & _SPELLED:
        return lambda token, text: text.encode()
    spelled, added = _spelling(backend), set(backend.get_added_tokens_decoder())

    def told(token: int, text: str) -> bytes:
        written = None if token in added else backend.id_to_token(token)
        return text.encode() if written is None else spelled(written)

    return told


def _bytes_of(backend: Any) -> tuple[list[bytes], set[int]]:
    """The bytes of each token by its id, b"" where there is none, and which of them are special."""
    spelled = _spelling(backend)
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = [b""] * (max(vocabulary.values()) + 1)
    for text, token in vocabulary.items():
        if token in added:
            tokens[token] = str(added[token].content).encode()
        else:
            tokens[token] = spelled(text)
    return tokens, {token for token, one in added.items() if one.special}


def _spelling(backend: Any) -> Callable[[str], bytes]:
    """Reads the bytes of a token as the vocabulary writes them."""
    return partial(_by_letters, letters=_byte_letters()) if "ByteLevel" in _kinds(backend) else _by_fallback


def _kinds(backend: Any) -> set[str]:
    """The kinds of its decoder's parts."""
    return set() if backend.decoder is None else _kinds_of(json.loads(backend.decoder.__getstate__()))


def _kinds_of(decoder: dict[str, Any]) -> set[str]:
    return {decoder["type"]}.union(*(_kinds_of(part) for part in decoder.get("decoders", ())))


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE's letters: a printable byte is its own, another a letter behind the 255th."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


def _by_letters(text: str, letters: dict[str, int]) -> bytes:
    try:
        return bytes([letters[letter] for letter in text])
    except KeyError:  # a token of the vocabulary that training has added as text
        return text.encode()


def _by_fallback(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(_SPACE, " ").encode()
