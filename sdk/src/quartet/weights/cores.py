"""Work on many tensors by several threads: numpy, xxhash and zstd let go of the interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

#: Tensors that are worked on at once. A share of the cores, because the machine has other work: a trainer
#: steps on while its last version is encoded.
SHARE_OF_CORES, LEAST_THREADS, MOST_THREADS = 1 / 4, 2, 8
#: Fewer are hashed, in some 20 ms, sooner than threads begin to help.
SHARED_FROM_BYTES: Final = 256 << 20

One = TypeVar("One")
Result = TypeVar("Result")


def threads() -> int:
    """How many this process may have."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(MOST_THREADS, max(LEAST_THREADS, int(cores * SHARE_OF_CORES)))


def each(function: Callable[[One], Result], items: Sequence[One], hashed_bytes: int) -> list[Result]:
    """What it gives for each, in their order; by several threads where that hashes so many bytes. The error
    of the first that fails is raised."""
    if hashed_bytes < SHARED_FROM_BYTES:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads()) as pool:
        return list(pool.map(function, items))
