"""What of a run's configuration is told elsewhere: all of the run's own but keys and passwords, such as of a
judge.

1. A text is withheld where the name before it ends in one of SECRET, at any depth, also within a list or a
   table of that name. The name of a variable that holds a key (`api_key_var`) is none, and a number
   (`max_tokens`) is none.
2. Everything else is told as it is. Tables that say where a run is shown (SHOWN) are no part of the run.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

from quartet.run.config import SHOWN
from quartet.v1.orchestrator_service_pb2 import Run

SECRET: Final = re.compile(
    r"(?:api|access|private|secret)[_-]?keys?"
    # A word of its own: `hf_token`, `authToken`.
    r"|(?:^|[_-]|(?-i:(?<=[a-z])(?=[A-Z])))(?:token|passw(?:or)?ds?|secrets?|authorization)",
    re.IGNORECASE,
)
WITHHELD: Final = "(withheld)"


def settings_of(run: Run) -> dict[str, Any]:
    """What is told of a run's."""
    settings = tomllib.loads(run.config_toml)
    return {"run_id": run.run_id} | {
        name: withheld(value, name) for name, value in settings.items() if name not in SHOWN
    }


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
