"""The special tokens that a model's folder names, as transformers reads them; a template may print each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from quartet.config.model import ConfigError

SETTINGS: Final = "tokenizer_config.json"
#: Of an older form of the folder, in which it is the one that counts.
OLDER: Final = "special_tokens_map.json"
#: What a folder of the newer form says beside the names, be it nothing.
ADDED: Final = "added_tokens_decoder"


def named_tokens(folder: Path) -> dict[str, str]:
    """Their texts by their names, "bos_token" and such. Raises ConfigError."""
    settings = object_of(folder / SETTINGS)
    named = {**settings, **({} if ADDED in settings else object_of(folder / OLDER))}
    tokens = {name: token for name, token in named.items() if name.endswith("_token")}
    extra = named.get("extra_special_tokens")
    tokens |= extra if isinstance(extra, dict) else {}
    return {name: text for name, token in tokens.items() if (text := text_of(token))}


def text_of(token: Any) -> str:
    """The text of a token, which may be written with its properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def object_of(file: Path) -> Mapping[str, Any]:
    """What a file says; nothing where it is not there. Raises ConfigError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; fetch the model's files again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is no JSON object; fetch the model's files again")
    return found
