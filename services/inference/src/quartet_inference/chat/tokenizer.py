"""The tokenizer of a model's folder. The folder's own Python is never run.

A folder that has none is no error: whoever sends and takes tokens alone needs none. transformers makes an
empty one there, by which every text is no tokens and all tokens are no text: nothing is asked of that.
"""

from __future__ import annotations

from pathlib import Path

import structlog
from quartet.config import ConfigError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

log = structlog.get_logger()


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


def lacking(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """That a folder has no tokenizer, and what to do, which the log is told, too; empty where it has one."""
    if len(tokenizer) > len(tokenizer.added_tokens_decoder):
        return ""
    why = (
        f"the model's folder {str(folder)!r} has no tokenizer, so only token ids are served: copy "
        "tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja of the model it "
        "was made from into it, and start the service again"
    )
    log.warning("messages, texts, stop strings and structures are refused", why=why)
    return why
