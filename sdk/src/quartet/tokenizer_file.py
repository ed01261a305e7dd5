"""tokenizer.json of a model's folder, read by the library tokenizers, and the tokens that end its turns.

Nothing is cut or padded, which some files ask for; whoever serves the model does without, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quartet.config.model import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def tokenizer_of(folder: Path) -> Tokenizer:
    """That of a folder which has one. The library must be there. Raises ConfigError."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"tokenizer.json of the model in {folder} cannot be read: {error}; fetch the model's files again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_tokens_of(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens at which a model stops when it is served: those of generation_config.json, and the
    tokenizer's own. A file that is not there, or cannot be read, names none."""
    eos = _said(folder / "generation_config.json").get("eos_token_id")
    ends = {token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int)}
    own = _said(folder / "tokenizer_config.json").get("eos_token")
    text = own.get("content") if isinstance(own, dict) else own
    token = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return frozenset(ends if token is None else {*ends, token})


def _said(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
