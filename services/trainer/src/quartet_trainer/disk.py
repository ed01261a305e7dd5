"""A disk that may be slow, so that somebody hears that it goes on, and may be full or away.

1. What safetensors, transformers and torch write, each file in one call, is progress as long as the folder
   grows.
2. A file is flushed piece by piece, and no other thread of the process waits for it.
3. So is a file hashed.
4. What fails at the disk is NOT_READY, with what to do. The log has it once a minute, however often it fails.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog
import xxhash
from quartet.errors import QuartetError
from quartet.kit.folder import remedy_of
from quartet.kit.repeated import Repeated
from safetensors import SafetensorError

#: What to do where it cannot be read.
AWAY = "mend the disk and call again"
#: And where it cannot be written.
FULL = "make room there"
#: How often a folder is looked at.
LOOK_SECONDS = 5.0
#: Of a file, at once: even a slow disk takes it in a minute.
FLUSHED_BYTES = 1 << 30
#: Of a file that is hashed, at once.
READ_BYTES = 1 << 20
#: Of sync_file_range(2): wait for what is being written, write the rest, wait for that.
_WRITTEN_OUT = 1 | 2 | 4
#: What a sandbox without that call says, in which `fsync` does all of it.
_NOT_HERE = (errno.ENOSYS, errno.EPERM)
#: What st_blocks counts in.
_BLOCK_BYTES = 512

#: How libraries tell an errno.
_IN_WORDS = re.compile(r"(?:os error |Errno )(\d+)")

_told = Repeated()

log = structlog.get_logger()


@contextmanager
def growing(folder: Path, progress: Callable[[], None]) -> Iterator[None]:
    """Call `progress` whenever what lies in a folder has grown meanwhile; from a thread of its own."""
    done = threading.Event()

    def look() -> None:
        before = 0
        while not done.wait(LOOK_SECONDS):
            now = _written_bytes(folder)
            if now > before:
                before = now
                progress()

    thread = threading.Thread(target=look, name="growing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def flush(path: Path, progress: Callable[[], None] = lambda: None) -> None:
    """Wait until the disk has a file, or the names in a folder. Errors: OSError."""
    size = path.stat().st_size if path.is_file() else 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if size > FLUSHED_BYTES:
            for start in range(0, size, FLUSHED_BYTES):
                _write_out(descriptor, start)
                progress()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    progress()


def _write_out(descriptor: int, start: int) -> None:
    """Wait until a piece of a file is written, as far as the system tells of pieces; `fsync` has yet to make
    it last. Not by mmap, whose flush keeps the interpreter to itself. Errors: OSError."""
    if sys.platform != "linux":
        return
    place = ctypes.c_int64(start), ctypes.c_int64(FLUSHED_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sync_file_range(descriptor, *place, _WRITTEN_OUT):
        number = ctypes.get_errno()
        if number not in _NOT_HERE:
            raise OSError(number, os.strerror(number))


def digests(
    folder: Path, names: Sequence[str], progress: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """The xxh3_128 of each of these files below a folder. Errors: OSError."""
    return {name: _digest(folder / name, progress) for name in names}


def _digest(file: Path, progress: Callable[[], None]) -> str:
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while piece := stream.read(READ_BYTES):
            state.update(piece)
            progress()
    return str(state.hexdigest())


@contextmanager
def on_disk(what: str, remedy: str) -> Iterator[None]:
    """What fails in here is of this disk. Errors: NOT_READY."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        # Callers try again until it is mended.
        held_back = _told.held_back((what, why))
        if held_back is not None:
            log.error("disk_failed", what=what, why=why, held_back=held_back)
        raise failed(what, why, getattr(error, "errno", None), remedy) from error


def failed(what: str, why: str, number: int | None, remedy: str) -> QuartetError:
    """What is said of it, with what to do; `number` is its errno, None where at most words tell it."""
    if number is None and (found := _IN_WORDS.search(why)):
        number = int(found[1])
    then = remedy_of(number, remedy)
    return QuartetError("NOT_READY", f"{what}: {why}; {then}", remedy=then)


def _written_bytes(folder: Path) -> int:
    """What the disk was given so far: the size of a file that is being written may be its last one."""
    try:
        return sum(path.stat().st_blocks for path in folder.rglob("*")) * _BLOCK_BYTES
    except OSError:  # renamed meanwhile; whoever writes says what else is wrong
        return 0
