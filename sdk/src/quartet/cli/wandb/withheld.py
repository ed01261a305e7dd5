"""What of a run's configuration is not told to Weights & Biases: keys and passwords, such as of a judge.

1. A text is withheld where the name before it ends in one of SECRET, at any depth, also within a list or a
   table of that name. The name of a variable that holds a key (`api_key_var`) is none, and a number
   (`max_tokens`) is none.
2. Everything else is told as it is.
"""

from __future__ import annotations

import re
from typing import Any, Final

SECRET: Final = re.compile(
    r"(?:api|access|private|secret)[_-]?keys?"
    # A word of its own: `hf_token`, `authToken`.
    r"|(?:^|[_-]|(?-i:(?<=[a-z])(?=[A-Z])))(?:token|passw(?:or)?ds?|secrets?|authorization)",
    re.IGNORECASE,
)
WITHHELD: Final = "(withheld)"


def withheld(settings: Any, name: str = "") -> Any:
    """The settings without them."""
    match settings:
        case dict():
            return {key: withheld(one, name if _is_secret(name) else key) for key, one in settings.items()}
        case list():
            return [withheld(value, name) for value in settings]
        case str() if settings and _is_secret(name):
            return WITHHELD
    return settings


def _is_secret(name: str) -> bool:
    return any(found.end() == len(name) for found in SECRET.finditer(name))
