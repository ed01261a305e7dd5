"""Texts that cannot fit, told apart before they are tokenized, which takes seconds for megabytes.

The bound is sound: a token of the kinds of tokenizer that are measured here stands for at most so many
characters, so a text of more characters has more tokens than there is room for. White space does not count
where the tokenizer has a special token that swallows what stands beside it. What other kinds do is not known;
there, nothing is refused here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from quartet.errors import QuartetError
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, TokenizersBackend

#: Composed characters of Unicode come from at most so many.
MOST_COMPOSED = 4
#: How byte-level vocabularies write white space.
_WHITE = str.maketrans("", "", "ĠĊĉčċČ▁")
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split"}


@dataclass(frozen=True)
class Longest:
    """The most characters that a token stands for."""

    visible: int  # but white space
    all: int | None  # with it; None where any amount of it may be in one


def longest(tokenizer: PreTrainedTokenizerBase) -> Longest | None:
    """The longest token; None where that is not bounded."""
    if not isinstance(tokenizer, TokenizersBackend):
        return None
    made: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = made["model"], made["added_tokens"]
    if model["type"] != "BPE" or not _says_every_byte(made):
        return None
    shrinks = _most_shrunk(made["normalizer"])
    if shrinks is None or not all(_keeps(one) for one in _each(made["pre_tokenizer"], "pretokenizers")):
        return None
    longest_added = max((len(token["content"]) for token in added), default=1)
    visible = max(len(token.translate(_WHITE)) for token in model["vocab"])
    swallows = any(token["lstrip"] or token["rstrip"] for token in added)
    return Longest(
        visible=shrinks * max(visible, longest_added, 1),
        all=None if swallows else shrinks * max(longest_added, *map(len, model["vocab"])),
    )


def check_length(text: str, longest: Longest, room: int) -> None:
    """Errors: PROMPT_TOO_LONG."""
    if len(text) <= longest.visible * room:  # with white space tokens are no shorter
        return
    at_least = -(-len("".join(text.split())) // longest.visible)
    if longest.all is not None:
        at_least = max(at_least, -(-len(text) // longest.all))
    if at_least > room:
        raise too_long(f"at least {at_least}", at_least, room)


def too_long(how_many: str, tokens: int, room: int) -> QuartetError:
    """A prompt that does not fit."""
    return QuartetError(
        "PROMPT_TOO_LONG",
        f"the prompt has {how_many} tokens, at most {room - 1} leave room for one: the engine's context is "
        f"max_model_len = {room} of [inference]; raise it, as far as the model was made for, or shorten the "
        "prompts",
        tokens=tokens,
        limit=room - 1,
    )


def _each(part: dict[str, Any] | None, of: str) -> list[dict[str, Any]]:
    """The parts of a sequence, or the one that there is."""
    if part is None:
        return []
    return [inner for one in part[of] for inner in _each(one, of)] if part["type"] == "Sequence" else [part]


def _says_every_byte(made: dict[str, Any]) -> bool:
    """No text is unknown to it: those that are may vanish, or become one token together."""
    vocabulary, model = made["model"]["vocab"], made["model"]
    parts = _each(made["pre_tokenizer"], "pretokenizers") + _each(made["normalizer"], "normalizers")
    if any(part["type"] == "ByteLevel" for part in parts):
        return all(byte in vocabulary for byte in ByteLevel.alphabet())
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _most_shrunk(normalizer: dict[str, Any] | None) -> int | None:
    """Characters that become one; None where any number may."""
    most = 1
    for part in _each(normalizer, "normalizers"):
        if part["type"] == "NFC":
            most *= MOST_COMPOSED
        elif part["type"] == "Replace":
            pattern = part["pattern"].get("String")
            if pattern is None or len(part["content"]) < len(pattern):
                return None
        elif part["type"] not in ("Prepend", "ByteLevel"):
            return None
    return most


def _keeps(part: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer leaves all characters there."""
    return part["type"] in _KEEPING and part.get("behavior") != "Removed"
