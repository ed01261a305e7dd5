"""Text files that a user names."""

from __future__ import annotations

from pathlib import Path

from quartet.config.model import ConfigError


def read_text(file: Path, what: str) -> str:
    """A file's text, which is UTF-8, without the mark that some editors begin it with. Raises ConfigError
    that begins with what it is."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} is not UTF-8 at byte {error.start}; save it as that") from error
