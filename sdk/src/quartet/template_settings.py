"""Variables of a chat template, as a request or a run chooses them: `template_settings` of the contract.

1. They travel as a JSON object of at most MAX_SETTINGS_BYTES; none as an empty text. Equal ones are written
   alike. A value is whatever JSON has: a template may want a list.
2. What renders a conversation has names of its own (RESERVED), which are refused. Any other name goes to the
   template, which passes over what it does not know.
3. Laid over others they win key by key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

#: They travel with every turn, and are compared there.
MAX_SETTINGS_BYTES: Final = 8192
#: What transformers gives a template, or takes for itself; the test holds it against its signature.
RESERVED: Final = frozenset(
    {
        "self",
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
_OBJECT: Final = 'send a JSON object, such as {"enable_thinking": false}'


def written(settings: Mapping[str, Any]) -> str:
    """As they travel. Raises ValueError: what is wrong with them, and what to do."""
    if taken := sorted(RESERVED & settings.keys()):
        raise ValueError(f"{taken[0]} is no variable that can be chosen: rendering sets it itself; remove it")
    if not settings:
        return ""
    try:
        text = json.dumps(settings, sort_keys=True, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())  # an escape may have stood for half a surrogate pair
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be written as JSON ({error}); {_OBJECT}") from error
    if size > MAX_SETTINGS_BYTES:
        raise _too_long(size)
    return text


def read(text: str) -> dict[str, Any]:
    """What travelled. Raises ValueError, likewise."""
    if len(text) > MAX_SETTINGS_BYTES:
        raise _too_long(len(text))
    try:
        settings = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_OBJECT} ({error})") from error
    if not isinstance(settings, dict):
        raise ValueError(_OBJECT)
    written(settings)
    return settings


def overlaid(text: str, own: object) -> str:
    """What travels, with others laid over it. Raises ValueError, likewise."""
    if not own:
        return text
    if not isinstance(own, Mapping):
        raise ValueError(_OBJECT)
    return written({**read(text), **own})


def _too_long(size: int) -> ValueError:
    return ValueError(f"it has {size} bytes as JSON; at most {MAX_SETTINGS_BYTES} travel: shorten it")
