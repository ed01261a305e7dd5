"""Packages that only parts of the command line need."""

from __future__ import annotations

import importlib.util

from quartet.config import ConfigError


def need(*packages: str, extra: str = "cli") -> None:
    """Refuse now what would fail at the end. Raises ConfigError."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} is not installed; in the repository: pip install './sdk[{extra}]'"
        )
