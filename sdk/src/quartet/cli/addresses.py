"""Addresses (URLs) as they are shown: what one says of a user is shown to nobody."""

from __future__ import annotations

import re
from typing import Final

#: Up to the last @ of it: who wrote a secret down with one of its own has not escaped that.
_USER: Final = re.compile(r"(?<=://)[^/\s]+(?=@)")


def without_user(text: str) -> str:
    """A text's addresses without what they say of a user."""
    return _USER.sub("****", text)
