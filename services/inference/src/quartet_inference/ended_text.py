"""The text of a completion that has ended: all of it but what ended it.

1. An end token and a stop token are no part of it, and it ends before the stop string that ended it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quartet_inference.chat import Chat
from quartet_inference.engine import Finish, Reason
from quartet_inference.stop_strings import before


def ended_text(
    chat: Chat, event: Finish, sampled: Sequence[int], shown: Collection[int], min_tokens: int
) -> tuple[str, str]:
    """The text, with these special tokens, and the stop string or token that ended it; empty: neither."""
    if event.stop_string:
        first = chat.text(sampled[:min_tokens], keep=shown)
        return before(chat.text(sampled, keep=shown), event.stop_string, first), event.stop_string
    if event.reason is Reason.LENGTH:
        return chat.text(sampled, keep=shown), ""
    match = "" if event.stop_token is None else chat.text([event.stop_token], special=True)
    return chat.text(sampled[:-1], keep=shown), match
