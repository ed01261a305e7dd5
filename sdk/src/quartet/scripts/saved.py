"""`save_model`: a copy of a model's folder, where the script wants it."""

from __future__ import annotations

import shutil
from pathlib import Path

from quartet.config.model import ConfigError


def copy_model(checkpoint: Path, target: str | Path) -> None:
    """Put the files there, beside what is there; nothing where it is the same folder. Raises ConfigError."""
    if Path(target).resolve() == checkpoint.resolve():
        return
    try:
        shutil.copytree(checkpoint, target, dirs_exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save_model: {target} cannot be written: {error}") from error
