"""Payloads in shared memory: on one host their bytes need no network.

1. A file in SHARED_FOLDER is a token, then the payload. It appears under its name complete, or not at all.
2. It lives no longer than its payload, and not longer than its process: whoever is killed leaves files that
   nobody holds a lock on, and the next publisher on the host removes those.
3. Bounded in bytes and number: the oldest files go first. A reader that has mapped one keeps its memory.
4. A reader believes nothing: what is no such file, has another token or another size is not taken, and the
   tensors are verified as if they had come over the network.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path

import structlog

from quartet.v1 import weights_pb2 as pb
from quartet.weights.payload import Payload

SHARED_FOLDER = Path("/dev/shm")
PREFIX = "quartet-weights-"
TOKEN_BYTES = 16
#: Of all files of one process; memory that the tensors do not share.
SHARED_BYTES = 16 << 30
#: Each holds a descriptor open.
MAX_FILES = 64

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _File:
    """A published file: unlinked by `finalizer`, which also closes the descriptor that holds the lock."""

    offer: pb.SharedPayload
    size: int
    finalizer: weakref.finalize[[Path, int], Payload]


class SharedPayloads:
    """The files of one publisher. Not thread-safe: one thread owns it."""

    def __init__(self, limit_bytes: int = SHARED_BYTES, folder: Path = SHARED_FOLDER) -> None:
        self._limit_bytes, self._folder = limit_bytes, folder
        # By identity of the payload, in the order of their making.
        self._files: dict[int, _File] = {}

    def offer(self, payload: Payload) -> pb.SharedPayload | None:
        """Where the payload can be mapped; None where there is no room. Copies it the first time."""
        self._files = {key: file for key, file in self._files.items() if file.finalizer.alive}
        known = self._files.get(id(payload))
        if known is not None:
            return known.offer
        if payload.size > self._limit_bytes:
            return None
        sweep(self._folder)
        while len(self._files) >= MAX_FILES or payload.size > self._limit_bytes - self._occupied_bytes:
            self._files.pop(next(iter(self._files))).finalizer()
        token = secrets.token_bytes(TOKEN_BYTES)
        path = self._folder / f"{PREFIX}{os.getpid()}-{token.hex()}"
        try:
            descriptor = _write(path, token, payload)
        except OSError as error:
            log.info("shared memory not used", why=str(error), bytes=payload.size)
            return None
        made = _File(
            pb.SharedPayload(path=str(path), token=token),
            payload.size,
            weakref.finalize(payload, _remove, path, descriptor),
        )
        self._files[id(payload)] = made
        return made.offer

    @property
    def _occupied_bytes(self) -> int:
        return sum(file.size for file in self._files.values())


def _write(path: Path, token: bytes, payload: Payload) -> int:
    """Make the file and return the descriptor that holds its lock."""
    descriptor = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for part in (memoryview(token), *payload.parts):
            while part:
                part = part[os.write(descriptor, part) :]
        # Named only now: nobody finds a file that is not complete, or that could be taken for a dead one's.
        _name(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _name(descriptor: int, path: Path) -> None:
    # os.link follows the symbolic link of a descriptor only when told which folder that lies in.
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(descriptor), path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _remove(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove the files of publishers that are no more: nobody holds their locks."""
    for path in folder.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # Removed meanwhile, or another user's.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


class SharedMemory:
    """The reader's side: a Transport."""

    def __init__(self, folder: Path = SHARED_FOLDER) -> None:
        self._folder = folder

    def ask(self, request: pb.GetManifestRequest) -> None:
        """Say that this process can map the publisher's files."""
        request.shared_memory = True

    async def payload(self, answer: pb.GetManifestResponse) -> memoryview | None:
        """The payload as a mapping of the file; None where it is not to be had."""
        if not answer.HasField("shared"):
            return None
        try:
            return self._mapped(answer.shared, answer.manifest.payload_bytes)
        except OSError as error:
            log.info("shared memory not reached", path=answer.shared.path, why=str(error))
            return None

    def _mapped(self, shared: pb.SharedPayload, size: int) -> memoryview | None:
        path = Path(shared.path)
        if path.parent != self._folder or not path.name.startswith(PREFIX):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size != TOKEN_BYTES + size:
                return None
            if os.pread(descriptor, TOKEN_BYTES, 0) != shared.token or len(shared.token) != TOKEN_BYTES:
                return None
            mapping = mmap.mmap(descriptor, TOKEN_BYTES + size, prot=mmap.PROT_READ)
            return memoryview(mapping)[TOKEN_BYTES:]
        finally:
            os.close(descriptor)
