"""The folder of all saved states: made at the start, and one trainer's alone for as long as it runs."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from quartet.config import ConfigError
from quartet.kit.folder import check_folder, lock_file

#: No run's folder is called so, because no run's name has an "@".
LOCK = "@lock"


def state_root(configured: Path) -> Path:
    """The folder, created. Raises ConfigError."""
    root = _expanded(configured)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"state_dir = {str(configured)!r} cannot be created: {error.strerror}; name another folder"
        ) from error
    return root


def check_state_root(configured: Path) -> None:
    """Whether `state_root` and `hold` would succeed now; makes nothing. Raises ConfigError."""
    root = _expanded(configured)
    check_folder("state_dir", root)
    if (root / LOCK).exists():
        hold(root).close()


def _expanded(configured: Path) -> Path:
    try:
        return configured.expanduser()
    except RuntimeError as error:  # "~" of a user who is not there
        raise ConfigError(
            f"state_dir = {str(configured)!r} is refused: {error}; name another folder"
        ) from error


def hold(root: Path) -> IO[bytes]:
    """Keep other trainers out until what is returned is closed. Raises ConfigError."""
    try:
        return lock_file(root / LOCK)
    except BlockingIOError:
        raise ConfigError(
            f"state_dir = {str(root)!r} belongs to a trainer that is running; stop it, or name another folder"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"state_dir = {str(root)!r} cannot be written: {error.strerror}; name another folder"
        ) from error
