"""A folder that one process at a time may fill."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quartet.config import ConfigError
from quartet.kit.folder import lock_file

LOCK = ".lock"


@contextmanager
def held(folder: Path, refusal: str) -> Iterator[None]:
    """The folder, made and locked. Raises ConfigError with the refusal where another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_file(folder / LOCK)
    except BlockingIOError:
        raise ConfigError(refusal) from None
    with lock:
        yield


def empty(folder: Path, *keep: str) -> None:
    """Delete everything in a folder that is held, but its lock and what has these names."""
    for entry in list(folder.iterdir()):
        if entry.name in (LOCK, *keep):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def remove(folder: Path) -> None:
    """Delete a folder that is held. One that cannot be is left empty: a link, a mount, what is in a folder of
    somebody else's, or on NFS for as long as it is held."""
    empty(folder)
    with suppress(OSError):
        shutil.rmtree(folder)
