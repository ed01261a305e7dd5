"""`save_model`: a model's folder, where the script wants it, in which other files may be.

1. A file of the same name is written over, also by the model of a training that was stopped, which
   `quartet export` writes nowhere but into a folder of its own. Of that nobody hears.
2. Weights of a model that was there before go, as when transformers saves: of one in parts it would load
   what is whole.
3. A folder that is there stays as private, or as shared, as it is.
4. What a writer that was killed has left in it goes with the next save, unless others write there meanwhile,
   where the file system has locks of folders.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from quartet.config.model import ConfigError
from quartet.kit.folder import check_folder
from quartet.scripts.process import run_command

#: Of a model, whole or in parts, and what says which part has which tensor.
WEIGHTS: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

#: Of a folder in the target, until what is in it is whole.
UNFINISHED: Final = ".quartet-model-"


def copy_model(
    checkpoint: Path, target: str | Path, copied: Callable[[str, str], object] = shutil.copy2
) -> None:
    """Put the files there, beside what is there; nothing where it is the same folder. Raises ConfigError."""
    if Path(target).resolve() == checkpoint.resolve():
        return
    try:
        Path(target).mkdir(parents=True, exist_ok=True)
        files = list(checkpoint.iterdir())
        for one in files:
            place = Path(target) / one.name
            if one.is_dir():
                shutil.copytree(one, place, copy_function=copied, dirs_exist_ok=True)
            else:
                copied(str(one), str(place))
        saved = {one.name for one in files}
        for one in Path(target).iterdir():
            if WEIGHTS.fullmatch(one.name) and one.name not in saved:
                one.unlink()
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
    with _unfinished(target.absolute()) as beside:
        whole = Path(beside) / "model"

        def in_words(told: str) -> str:
            return told.replace(str(whole), str(target)).replace(beside, str(target))

        try:
            run_command(
                export_command(output, whole),
                lambda told: say(in_words(told)),
                lambda told: failed(in_words(told)),
            )
        except ConfigError as refused:
            raise ConfigError(in_words(str(refused))) from None
        copy_model(whole, target, os.replace)


@contextmanager
def _unfinished(target: Path) -> Iterator[str]:
    """A folder in the target that goes afterwards. Whoever has one shares a lock of the target."""
    lock = os.open(target, os.O_RDONLY)
    try:
        with suppress(OSError):  # others write, or the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in target.glob(f"{UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=target) as folder:
            yield folder
    finally:
        os.close(lock)
