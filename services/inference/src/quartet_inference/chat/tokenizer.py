"""The tokenizer of a model's folder. The folder's own Python is never run."""

from __future__ import annotations

from pathlib import Path

from quartet.config import ConfigError
from transformers import AutoTokenizer, PreTrainedTokenizerBase


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer. Errors: ConfigError."""
    try:
        # Left out, transformers would ask at the terminal whether to run what the folder brings along.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model = {str(folder)!r} has no tokenizer that can be loaded: {error}") from error
    return tokenizer
