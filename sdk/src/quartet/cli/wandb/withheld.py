"""What of a run's configuration is not told to Weights & Biases: keys and passwords, such as of a judge.

1. A text is withheld where the name before it ends in one of SECRET, at any depth, also within a list. The
   name of a variable that holds a key (`api_key_var`) is none, and a number (`max_tokens`) is none.
2. Everything else is told as it is.
"""

from __future__ import annotations

import re
from typing import Any, Final

SECRET: Final = re.compile(
    r"api[_-]?key|(?:access|private|secret)[_-]?key|(?:^|[_-])(?:token|passw(?:or)?d|secret)", re.IGNORECASE
)
WITHHELD: Final = "(withheld)"


def withheld(settings: Any, name: str = "") -> Any:
    """The settings without them."""
    match settings:
        case dict():
            return {key: withheld(value, key) for key, value in settings.items()}
        case list():
            return [withheld(value, name) for value in settings]
        case str() if settings and _is_secret(name):
            return WITHHELD
    return settings


def _is_secret(name: str) -> bool:
    return any(found.end() == len(name) for found in SECRET.finditer(name))
