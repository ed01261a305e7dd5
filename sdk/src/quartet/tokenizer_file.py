"""tokenizer.json of a model's folder, read by the library tokenizers.

Nothing is cut or padded, which some files ask for; whoever serves the model does without, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
