"""Memory that versions live in, used again for the next ones.

A process pays for fresh memory before its first byte is written: a fault and a cleared page each, and under a
hypervisor that takes free memory back a multiple of that. A version needs what the one before it gives back.

1. A block is nobody else's until the last view of it is gone, whoever holds that view.
2. No more is kept than is lent: who holds one version keeps room for one more, who holds none keeps nothing.
3. Only blocks of the very size are used again. Who finds none lets go of as much as it takes, the oldest
   first, before it touches fresh memory.
4. So what is lent and what is kept are together never more than was lent at once before: keeping adds nothing
   to the most that is needed (docs/weights.md).
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

#: Smaller blocks come from the heap, which keeps what it is given back.
KEPT_FROM_BYTES = 1 << 20
#: Of every block, as torch aligns its own; one that is mapped begins at a page.
ALIGNMENT = 64

_Block = npt.NDArray[np.uint8]


class Pages:
    """Blocks that are lent and blocks that are kept."""

    def __init__(self) -> None:
        # Who gives back never waits for it: a view may be dropped anywhere, in here too.
        self._lock = threading.Lock()
        self._returned: deque[_Block] = deque()
        self._kept: list[_Block] = []
        self._kept_bytes = 0
        self._lent_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Of blocks that nobody uses."""
        return self._kept_bytes

    def take(self, size: int) -> memoryview:
        """So many writable bytes, of any content."""
        if size < KEPT_FROM_BYTES:
            return _aligned(size).data
        with self._lock:
            self._count_returned()
            block = self._found(size)
        if block is None:
            block = _mapped(size)
        with self._lock:
            self._lent_bytes += size
        self._settle()
        # A view of its own: it dies with the last view of it, the block does not.
        lent = block.view()
        weakref.finalize(lent, self._give_back, block).atexit = False
        return lent.data

    def _found(self, size: int) -> _Block | None:
        for index, block in enumerate(self._kept):
            if block.nbytes == size:
                self._kept_bytes -= size
                return self._kept.pop(index)
        self._keep(self._kept_bytes - size)
        return None

    def _keep(self, most_bytes: int) -> None:
        while self._kept and self._kept_bytes > most_bytes:
            self._kept_bytes -= self._kept.pop(0).nbytes

    def _give_back(self, block: _Block) -> None:
        self._returned.append(block)
        self._settle()

    def _settle(self) -> None:
        # Whoever has the lock may have counted already; he comes here too.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._count_returned()
            finally:
                self._lock.release()

    def _count_returned(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._lent_bytes -= block.nbytes
            self._kept.append(block)
            self._kept_bytes += block.nbytes
        self._keep(self._lent_bytes)


def _aligned(size: int) -> _Block:
    memory = np.empty(size + ALIGNMENT - 1, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size]


def _mapped(size: int) -> _Block:
    # By itself and not from the heap: it goes back to the system whole, whatever lies beside it.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # built without
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


#: Those of this process.
take = Pages().take
