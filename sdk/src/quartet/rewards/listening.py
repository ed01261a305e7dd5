"""Where a script's service listens: a Unix socket in a folder that is its user's alone.

1. The folder is made, or refused where others can look into it: whoever reaches the socket reads the data.
2. One process at a time listens there. The lock is the kernel's and ends with the process, however that ends
   (a child that it forked and that lives on does not hold it); the socket that it left is removed.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from quartet.config.model import ConfigError

SCHEME: Final = "unix:"
#: Of Linux, without the null byte at its end.
MAX_PATH_BYTES: Final = 107

#: What this process listens at: a lock of the kernel's is no lock between two threads of a process.
_here: set[str] = set()
_mutex = threading.Lock()


@contextmanager
def held(address: str) -> Iterator[None]:
    """Nobody else listens at the address while inside. Raises ConfigError."""
    path = path_of(address)
    folder = path.parent
    _make_private(folder)
    with _mutex:
        if str(path) in _here:
            raise _is_served(address)
        lock = _locked(folder / f"{path.name}.lock", address)
        _here.add(str(path))
    try:
        _remove(path)
        yield
    finally:
        with _mutex:
            _here.discard(str(path))
            os.close(lock)


def _remove(path: Path) -> None:
    """What a process that is gone left. Raises ConfigError."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        why = f"{path} stands where reward functions are to listen, and cannot be removed: {error.strerror}"
        raise ConfigError(why) from None


def _locked(file: Path, address: str) -> int:
    """A descriptor of the file with its lock, which ends with it. Raises ConfigError."""
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{file}, for the socket of reward functions: {error.strerror}") from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who held it before may have removed the folder since it was opened: that is nobody's lock.
        is_there = os.path.samestat(os.fstat(lock), file.stat())
    except FileNotFoundError:
        is_there = False
    except OSError:  # EAGAIN or EACCES, as the system likes
        os.close(lock)
        raise _is_served(address) from None
    if not is_there:
        os.close(lock)
        raise _is_served(address)
    return lock


def path_of(address: str) -> Path:
    """Of an address. Raises ConfigError."""
    path = Path(address.removeprefix(SCHEME))
    if not address.startswith(SCHEME) or not path.is_absolute():
        raise ConfigError(f"address = {address!r} is refused: a script serves at unix:/FOLDER/NAME")
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise ConfigError(
            f"address = {address!r} is a path of {size} bytes, and a socket's has {MAX_PATH_BYTES} at most; "
            "set TMPDIR to a folder with a shorter path"
        )
    return path


def _make_private(folder: Path) -> None:
    """Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder}, for the socket of reward functions: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{folder}, for the socket of reward functions, is not this user's alone; make it so (chmod "
            "700), or name another"
        )


def _is_served(address: str) -> ConfigError:
    return ConfigError(
        f"this run is trained already: somebody serves its reward functions at {address}. End that script, "
        "or give this one a folder of its own (args.output_dir)"
    )
