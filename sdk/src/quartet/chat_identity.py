"""What makes tokens of a conversation in a model's folder, by digests of tokenizer and chat template.

1. Of the tokenizer counts which text has which number, and which merges lead to it: what else a release of
   transformers writes differently (padding, order, the form of merges) makes no other model.
2. What a folder does not have, or what cannot be read, has no digest, and is compared with nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from quartet.v1.common_pb2 import ChatIdentity


def chat_identity(folder: Path, model: str, template_file: Path | None = None) -> ChatIdentity:
    """That of a folder, whose model is called this; with a template of one's own, if there is one.

    Reads a file of some megabytes: not for the event loop.
    """
    try:
        own = template_file.read_text(encoding="utf-8") if template_file else template_of(folder)
        # Jinja drops the last line's end.
        template_digest = _digest(own.removesuffix("\n")) if own else b""
    except (OSError, ValueError, AttributeError):
        template_digest = b""
    return ChatIdentity(
        model=f"{model} with {template_file}" if template_file else model,
        tokenizer_digest=_tokenizer(folder),
        template_digest=template_digest,
    )


def differences(one: ChatIdentity, other: ChatIdentity) -> list[str]:
    """What of them is known of both, and is not the same, for a person."""
    pairs = {
        "tokenizer": (one.tokenizer_digest, other.tokenizer_digest),
        "chat template": (one.template_digest, other.template_digest),
    }
    return [name for name, (a, b) in pairs.items() if a and b and a != b]


def template_of(folder: Path) -> str:
    """The chat template of a folder; empty for none. Raises OSError, ValueError, AttributeError."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    settings = _json(folder / "tokenizer_config.json")
    found = settings.get("chat_template") or ""
    # Several by name in older folders.
    return found if isinstance(found, str) else json.dumps(found, sort_keys=True)


def _tokenizer(folder: Path) -> bytes:
    try:
        made = _json(folder / "tokenizer.json")
        vocab, merges = made["model"]["vocab"], made["model"].get("merges") or []
        # Unigram has texts with their scores, in the order of their numbers.
        numbers = dict(vocab) if isinstance(vocab, dict) else {text: at for at, (text, _) in enumerate(vocab)}
        numbers |= {one["content"]: one["id"] for one in made.get("added_tokens") or []}
        pairs = [one if isinstance(one, str) else " ".join(one) for one in merges]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return b""
    return _digest(json.dumps([sorted(numbers.items()), pairs]))


def _json(file: Path) -> Mapping[str, Any]:
    read: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return read


def _digest(text: str) -> bytes:
    return bytes(xxhash.xxh3_128_digest(text.encode()))
