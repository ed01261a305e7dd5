"""Payloads in shared memory: on one host their bytes need no network.

1. An offer is the path of a sealed memfd under /proc: a token, then the payload. Whoever maps it can rely on
   it: sealed, it never changes and never shrinks.
2. It lives no longer than its payload and its process, mappings apart: it has no name to be left behind.
3. Bounded in bytes, in number, and by the free space of ROOM_FOLDER, by which an operator says how much
   memory may be shared: the oldest go first.
4. A reader believes nothing: what is no such memory, is not sealed, has another token or another size is not
   taken, and the tensors are verified as if they had come over the network.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import weakref
from dataclasses import dataclass

from quartet.kit.own_log import get_logger
from quartet.v1 import weights_pb2 as pb
from quartet.weights.payload import Payload

NAME = "quartet-weights"
TOKEN_BYTES = 16
#: Of one process; memory that the tensors do not share.
SHARED_BYTES = 16 << 30
#: Each holds a descriptor open.
MAX_FILES = 64
#: Its free space is the room: little in a container that was given none.
ROOM_FOLDER = "/dev/shm"
#: F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_WRITE by their numbers: Linux alone has the names, and
#: who fetches elsewhere imports this, too.
SEALS = 0x1 | 0x2 | 0x4 | 0x8

_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")

log = get_logger()


@dataclass(frozen=True, slots=True)
class _Shared:
    """Memory that is offered; `finalizer` closes it."""

    offer: pb.SharedPayload
    size: int
    finalizer: weakref.finalize[[int], Payload]


class SharedPayloads:
    """What one publisher offers. Not thread-safe: one thread owns it."""

    def __init__(self, limit_bytes: int = SHARED_BYTES) -> None:
        self._limit_bytes = limit_bytes
        # By identity of the payload, in the order of their making.
        self._held: dict[int, _Shared] = {}

    def offer(self, payload: Payload) -> pb.SharedPayload | None:
        """Where the payload can be mapped; None where there is no room. Copies it the first time."""
        self._held = {key: held for key, held in self._held.items() if held.finalizer.alive}
        known = self._held.get(id(payload))
        if known is not None:
            return known.offer
        try:
            if not self._make_room(payload.size):
                return None
            token = secrets.token_bytes(TOKEN_BYTES)
            descriptor = _sealed(token, payload)
        except OSError as error:
            log.info("shared memory not used", why=str(error), bytes=payload.size)
            return None
        made = _Shared(
            pb.SharedPayload(path=f"/proc/{os.getpid()}/fd/{descriptor}", token=token),
            payload.size,
            weakref.finalize(payload, os.close, descriptor),
        )
        self._held[id(payload)] = made
        return made.offer

    def _make_room(self, size: int) -> bool:
        """Whether so many bytes may be shared; gives up the oldest for them."""
        status = os.statvfs(ROOM_FOLDER)
        limit_bytes = min(self._limit_bytes, status.f_bavail * status.f_frsize)
        if size > limit_bytes:
            return False
        while len(self._held) >= MAX_FILES or size > limit_bytes - self.occupied_bytes:
            self._held.pop(next(iter(self._held))).finalizer()
        return True

    @property
    def occupied_bytes(self) -> int:
        """Of all payloads that are offered."""
        return sum(held.size for held in self._held.values())


def _sealed(token: bytes, payload: Payload) -> int:
    """The descriptor of sealed memory with the token and the payload."""
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in (memoryview(token), *payload.parts):
            while part:
                part = part[os.write(descriptor, part) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class SharedMemory:
    """The reader's side: a Transport."""

    def ask(self, request: pb.GetManifestRequest) -> None:
        """Say that this process can map the publisher's memory."""
        request.shared_memory = True

    async def payload(self, answer: pb.GetManifestResponse) -> memoryview | None:
        """The payload as a mapping; None where it is not to be had."""
        if not answer.HasField("shared"):
            return None
        try:
            return _mapped(answer.shared, answer.manifest.payload_bytes)
        except OSError as error:
            log.info("shared memory not reached", path=answer.shared.path, why=str(error))
            return None


def _mapped(shared: pb.SharedPayload, size: int) -> memoryview | None:
    # Looked at before it is opened: in another host's or container's /proc this may be anything.
    if not _PATH.fullmatch(shared.path) or not os.readlink(shared.path).startswith(f"/memfd:{NAME}"):
        return None
    descriptor = os.open(shared.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        # Only a memfd has seals to ask for. Without them it could shrink under the mapping: SIGBUS.
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
        if not sealed or os.fstat(descriptor).st_size != TOKEN_BYTES + size:
            return None
        if os.pread(descriptor, TOKEN_BYTES, 0) != shared.token or len(shared.token) != TOKEN_BYTES:
            return None
        mapping = mmap.mmap(descriptor, TOKEN_BYTES + size, prot=mmap.PROT_READ)
        return memoryview(mapping)[TOKEN_BYTES:]
    finally:
        os.close(descriptor)
