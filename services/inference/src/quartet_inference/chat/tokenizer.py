"""The tokenizer of a model's folder, and the short ways to it. The folder's own Python is never run.

1. A folder that has none is no error: whoever sends and takes tokens alone needs none. transformers makes an
   empty one there, by which every text is no tokens and all tokens are no text: nothing is asked of that.
2. `encoder` and `decoder` give what the tokenizer's own `encode` and `decode` give, by its library alone
   where there is one: transformers' way there takes several times as long.
3. A long text is encoded while other threads run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog
from quartet.config import ConfigError
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend

#: Up to so many a text is encoded without letting another thread run. Whoever lets one gets the interpreter
#: back when a busy one, as the engine's, gives it up: 5 ms, which the event loop would lose for each text.
SHORT_CHARS = 4096

log = structlog.get_logger()

Encode = Callable[[str, bool], list[int]]
Decode = Callable[[list[int]], str]


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


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """Text to tokens; the second argument: with the special tokens that the tokenizer itself puts around."""
    own = type(tokenizer)
    if not isinstance(tokenizer, TokenizersBackend) or own._encode_plus is not TokenizersBackend._encode_plus:

        def plain(text: str, add_special: bool) -> list[int]:
            return [int(token) for token in tokenizer.encode(text, add_special_tokens=add_special)]

        return plain
    tokenizer.encode("")  # sets what it sets each time: no truncation, how special tokens are read
    backend = tokenizer.backend_tokenizer

    def fast(text: str, add_special: bool) -> list[int]:
        if len(text) <= SHORT_CHARS:
            return list(backend.encode(text, add_special_tokens=add_special).ids)
        return list(backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)

    return fast


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Tokens to text, special ones included."""
    if isinstance(tokenizer, TokenizersBackend):
        backend = tokenizer.backend_tokenizer

        def fast(token_ids: list[int]) -> str:
            return str(backend.decode(token_ids, skip_special_tokens=False))

        return fast

    def plain(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return plain
