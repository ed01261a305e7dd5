"""The tokenizer of a model's folder, for text that no chat template renders, without transformers.

1. Tokens are those that transformers' tokenizer of the folder gives a text, with what tokenizer.json puts
   before and after any.
2. Text is without special tokens, as TRL decodes completions. Special are those that tokenizer.json says are,
   and those that the folder's other files name.
3. Nothing is cut or padded, whatever tokenizer.json asks for. May be used by several threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from quartet.cli.extras import need
from quartet.cli.sft.special_tokens import ADDED, SETTINGS, named_tokens, object_of, text_of
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
    yield from named_tokens(folder).values()
    added = object_of(folder / SETTINGS).get(ADDED) or {}
    yield from (text_of(token) for token in added.values() if token.get("special"))
