"""Folders of a service: one process at a time, and whether they can be used at all.

1. A lock is the kernel's, on an open file: it ends with the process, however that ends, and no file that a
   dead one left behind is in the way.
2. `check_folder` and `is_full` leave nothing behind and make nothing that has a name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

from quartet.config import ConfigError

#: What a file needs that is not empty: a block of the usual file systems.
BLOCK_BYTES = 4096
#: What to do about what is no fault of the file itself, by its errno.
_REMEDIES = {
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise this machine's limit of open files (fs.file-max)",
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or raise this user's quota",
    errno.EFBIG: "raise this process's limit of a file's size (ulimit -f)",
}


def lock_file(path: Path) -> IO[bytes]:
    """Lock the file, made if need be; closing it unlocks. Raises BlockingIOError where another holds it."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def check_folder(key: str, folder: Path) -> None:
    """Whether the folder can be made and written to. Raises ConfigError, naming the key that it stands at."""
    there = folder.absolute()
    try:
        while not there.exists():
            if there.is_symlink():
                there.stat()  # which says that it leads nowhere
            there = there.parent
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key} = {str(folder)!r} cannot be used: {there} takes no files ({error.strerror}); "
            "name a folder that this user can write"
        ) from None


def remedy_of(number: int | None, otherwise: str = "") -> str:
    """What to do where the system refuses a file with that errno, which may be unknown."""
    return _REMEDIES.get(number or 0, otherwise)


def flush(folder: Path) -> None:
    """The names in a folder survive a power cut from here on. Errors: OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder, or what this user may have of it, has no room for another file."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(BLOCK_BYTES))
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False


def unreadable_part(model: Path) -> Path | None:
    """A file of a model's folder that this user cannot read. What loads models says that it is not there."""
    parts = sorted([*model.glob("*.json"), *model.glob("*.safetensors")])
    return next((part for part in parts if not os.access(part, os.R_OK)), None)
