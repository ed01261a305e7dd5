"""The token of services that a launcher started on this machine, and how clients of the same user find it.

1. Each launch has a token of its own, in a file for its owner alone. It is on no command line and in no log.
2. A launch that goes on is announced in a folder for its user alone: a link for each of its addresses, to the
   token's file. A client finds the token by the address and shows it there and nowhere else: not to a service
   that was started otherwise, whatever the configuration says of that, and not at an address of an earlier
   launch of the same file. Where somebody else has made that folder first, it is one in RUNTIME, which nobody
   else can write to; a client looks in both.
3. The launcher holds a lock on the file. What one that was killed left behind counts for nothing, and the
   next launch removes it; where the file cannot be seen from there (it is in another container that has the
   same /tmp, on a share that is away) only once it is older than any launch.
4. Until it ends a launch has the folder locked, which others share: what clears /tmp of what is days old
   (systemd-tmpfiles) passes over what is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from quartet.config import ConfigError
from quartet.kit.security import TokenFile

TOKEN_BYTES = 32
#: Not TMPDIR, which the other terminal of the same user may have set otherwise.
PARENT = Path("/tmp")
#: Not XDG_RUNTIME_DIR, for the same reason. Not at first: it is removed when the user has logged out.
RUNTIME = Path("/run/user")
#: No launch goes on for so long.
LEFT_SECONDS = 90 * 86_400.0


def make_token(file: Path) -> None:
    """A fresh token, in place of an older one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_name(f".{file.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as opened:
        opened.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
    made.replace(file)


class Announcement:
    """A launch that goes on: its addresses and its token, until it is closed."""

    def __init__(self, addresses: Iterable[str], file: Path) -> None:
        """Raises ConfigError where the user's folder cannot be his alone."""
        folder = _own_folder()
        self._folder = os.open(folder, os.O_RDONLY)
        fcntl.flock(self._folder, fcntl.LOCK_SH)
        self._file = file.absolute()
        self._lock: IO[bytes] = self._file.open("r+b")
        # Clients hold it for as long as they take to ask whether it is held.
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The file and its links are of one time; in whole seconds, which every file system keeps.
        times = (int(time.time()),) * 2
        os.utime(self._file, times)
        for link in folder.iterdir():
            _remove(link, _is_left)
        self._links = [folder / _name(address) for address in addresses]
        for link in self._links:
            made = link.with_name(f".{link.name}.{os.getpid()}")
            made.unlink(missing_ok=True)
            made.symlink_to(self._file)
            os.utime(made, times, follow_symlinks=False)
            made.replace(link)

    def close(self) -> None:
        """Whoever asks finds no token. Its file stays: the configurations name it."""
        for link in self._links:
            _remove(link, self._made)
        self._lock.close()
        os.close(self._folder)

    def _made(self, link: Path) -> bool:
        try:
            return link.readlink() == self._file
        except OSError:  # somebody removed it
            return False


def token_at(address: str) -> TokenFile | None:
    """The token of a launch of this user that goes on and has a service at the address."""
    for folder in _folders():
        if "/" in address or not _private(folder, stat.S_ISDIR):
            continue
        link = folder / _name(address)
        file = _held(link)
        if file is not None and _is_of_one_launch(link, file):
            return TokenFile(file)
    return None


def _folders() -> tuple[Path, Path]:
    user = os.geteuid()
    return PARENT / f"quartet-{user}", RUNTIME / str(user) / "quartet"


def _own_folder() -> Path:
    """The first of them that can be the user's alone; there from now on. Raises ConfigError."""
    refused = []
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            refused.append(f"{folder} cannot be made: {error.strerror}; make room in {folder.parent}")
        else:
            if _private(folder, stat.S_ISDIR):
                return folder
            refused.append(
                f"{folder}, where the clients of this user find his services, is not his alone; remove it "
                "(what another user has made there he or root can remove)"
            )
    raise ConfigError(refused[0])


def _name(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{'127.0.0.1' if host == 'localhost' else host}:{port}"


def _private(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether it is of the kind, this user's, and nobody else can do anything with it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _is_of_one_launch(link: Path, file: Path) -> bool:
    """Not where a launch that was killed made the link, and another one of the same folder the file."""
    try:
        return link.lstat().st_mtime >= file.stat().st_mtime
    except OSError:  # it has ended since
        return False


def _remove(link: Path, goes: Callable[[Path], bool]) -> None:
    """A link that goes. Another launch may put its own in its place at any moment, so what was taken away is
    looked at again, and put back."""
    taken = link.with_name(f".{link.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # another launch removed it
        if not goes(link):
            return
        link.rename(taken)
        if not goes(taken):
            os.link(taken, link, follow_symlinks=False)  # refused where a third one has made its own
    taken.unlink(missing_ok=True)


def _is_left(link: Path) -> bool:
    """Whether the launcher that announced it is gone, for all that can be seen from here."""
    try:
        link.stat()
    except OSError:
        with contextlib.suppress(OSError):  # another launch removed it
            return time.time() - link.lstat().st_mtime > LEFT_SECONDS
    return _held(link) is None


def _held(link: Path) -> Path | None:
    """The token's file, if the launcher that announced it lives."""
    try:
        file = link.readlink()
        if not _private(file, stat.S_ISREG):
            return None
        with file.open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return file
    except OSError:
        return None
    return None
