"""The tokenizer of a model's folder, for text that no chat template renders, without transformers.

1. Tokens are those that transformers' tokenizer of the folder gives a text, with what tokenizer.json puts
   before and after any.
2. Text is without special tokens, as TRL decodes completions. Special are those that tokenizer.json says are,
   and those that the folder's other files name.
3. Nothing is cut or padded, whatever tokenizer.json asks for. May be used by several threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quartet.cli.extras import need
from quartet.config.model import ConfigError
from quartet.tokenizer_file import tokenizer_of


class TextTokenizer:
    """Text to tokens and back."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError."""
        need("tokenizers")
        if not (Path(folder) / "tokenizer.json").is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json, by which text is tokenized here; write it: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        self._tokenizer = tokenizer_of(Path(folder))
        self._tokenizer.add_special_tokens(list(dict.fromkeys(_special(Path(folder)))))

    def encode(self, text: str) -> list[int]:
        """Its tokens, with the special ones that the tokenizer adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Their text, without special tokens."""
        text: str = self._tokenizer.decode(list(ids))
        return text


def _special(folder: Path) -> Iterator[str]:
    """The tokens that are special by the other files of the folder."""
    settings = _object_of(folder / "tokenizer_config.json")
    added = settings.get("added_tokens_decoder")
    # Of an older form of the folder, and then the one that counts.
    named = {**settings, **({} if added else _object_of(folder / "special_tokens_map.json"))}
    extra = named.get("extra_special_tokens")
    if isinstance(extra, dict):
        named = {**named, **{f"{name}_token": token for name, token in extra.items()}}
    yield from (
        text for name, token in named.items() if name.endswith("_token") and (text := _text_of(token))
    )
    yield from (_text_of(token) for token in (added or {}).values() if token.get("special"))


def _text_of(token: Any) -> str:
    """The text of a token, which may be written with its properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _object_of(file: Path) -> Mapping[str, Any]:
    """What a file says; nothing where it is not there."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; fetch the model's files again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is no JSON object; fetch the model's files again")
    return found
