"""Remembers which messages became which tokens, for templates that cannot always extend tokens.

A template that is given other settings is another one: it does not know the conversations of the first.

1. Bounded in entries and in characters; what was used longest ago goes first.
2. A miss costs the caller one refused call, never a wrong prompt.
3. May be used from several threads.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

#: A thousand rollouts in flight have so many turns.
MAX_CONVERSATIONS = 4096
#: Of all of them together: what a few hundred long conversations hold.
MAX_CHARACTERS = 64 << 20

Messages = tuple[Mapping[str, Any], ...]


class Conversations:
    """Messages by the exact tokens that they were rendered to and answered with, and the settings of that."""

    def __init__(self) -> None:
        self._held: OrderedDict[bytes, Messages] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def keep(self, token_ids: Sequence[int], settings: str, messages: Messages) -> None:
        """Remember a conversation that ends with a sampled turn."""
        key = _key(token_ids, settings)
        with self._lock:
            self._forget(key)
            self._held[key] = messages
            self._characters += _characters(messages)
            while len(self._held) > MAX_CONVERSATIONS or self._characters > MAX_CHARACTERS:
                self._forget(next(iter(self._held)))

    def recall(self, token_ids: Sequence[int], settings: str) -> Messages | None:
        """The conversation that these tokens are, if it is remembered."""
        key = _key(token_ids, settings)
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key]

    def _forget(self, key: bytes) -> None:
        messages = self._held.pop(key, None)
        if messages is not None:
            self._characters -= _characters(messages)


def _key(token_ids: Sequence[int], settings: str) -> bytes:
    return hashlib.blake2b(array("I", token_ids).tobytes() + settings.encode(), digest_size=16).digest()


def _characters(messages: Messages) -> int:
    return sum(len(str(message)) for message in messages)
