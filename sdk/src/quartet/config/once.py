"""Files of a command line, each of which is read once: what a shell's <(...) names has nothing for a second
reader, to whom it would be a file that says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from quartet.config.load import read_toml
from quartet.config.model import ConfigError


def reads_once() -> Callable[[str], dict[str, Any]]:
    """A reader like read_toml. What it says is its caller's own, as a file may stand for two tables, which go
    their own ways; what it refuses it refuses every time."""
    known: dict[str, dict[str, Any] | ConfigError] = {}

    def read(path: str) -> dict[str, Any]:
        if path not in known:
            try:
                known[path] = read_toml(path)
            except ConfigError as error:
                known[path] = error
        found = known[path]
        if isinstance(found, ConfigError):
            raise found
        return deepcopy(found)

    return read
