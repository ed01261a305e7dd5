"""`save_model`: a model's folder, where the script wants it, in which other files may be.

1. A file of the same name is written over, also by the model of a training that was stopped, which
   `quartet export` writes nowhere but into a folder of its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from quartet.config.model import ConfigError
from quartet.kit.folder import check_folder
from quartet.scripts.process import run_command


def copy_model(
    checkpoint: Path, target: str | Path, copied: Callable[[str, str], object] = shutil.copy2
) -> None:
    """Put the files there, beside what is there; nothing where it is the same folder. Raises ConfigError."""
    if Path(target).resolve() == checkpoint.resolve():
        return
    try:
        shutil.copytree(checkpoint, target, copy_function=copied, dirs_exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save_model: {target} cannot be written: {error}") from error


def export_model(
    output: Path, target: Path, say: Callable[[str], object], failed: Callable[[str], Exception]
) -> None:
    """Put the model of an output folder's newest state there. Raises ConfigError, what `failed` makes of a
    sentence, KeyboardInterrupt."""
    from quartet.cli.export import export_command

    if not os.path.lexists(target):
        run_command(export_command(output, target), say, failed)
        return
    check_folder("save_model", target)
    with tempfile.TemporaryDirectory(prefix=".quartet-model-", dir=target) as beside:
        whole = Path(beside) / "model"
        run_command(
            export_command(output, whole), lambda told: say(told.replace(str(whole), str(target))), failed
        )
        copy_model(whole, target, os.replace)
