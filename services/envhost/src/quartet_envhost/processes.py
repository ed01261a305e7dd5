"""What a worker and everything that it started hold, as the kernel counts it.

1. A worker's processes are those of its session and all descendants of these: also what left its process
   group, and what outlived its parent. Only a child that made a session of its own *and* lost its parent is
   out of sight.
2. Memory is counted once: pages that forks share are not multiplied (PSS), where the plain sum is too much.
3. `kill` leaves none of them. A host that can read nothing, for want of a descriptor, ends the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# A process that forks while the list is read escapes it; so often it is read again.
_ROUNDS: Final = 5
# What reading about a process ends with when it has ended, or is not ours to look into.
_GONE: Final = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True, slots=True)
class Process:
    """A line of the process table."""

    pid: int
    parent: int
    session: int
    rss_bytes: int


def tree(leader: int) -> list[Process]:
    """The live processes of the worker whose session this is. Raises OSError where none can be read."""
    table = list(_table())
    children: dict[int, list[Process]] = defaultdict(list)
    for one in table:
        children[one.parent].append(one)
    found = {one.pid: one for one in table if one.session == leader}
    unseen = list(found.values())
    while unseen:
        for child in children[unseen.pop().pid]:
            if child.pid not in found:
                found[child.pid] = child
                unseen.append(child)
    return list(found.values())


def memory_bytes(processes: list[Process], enough: int) -> int:
    """What they hold together; exact where it is more than `enough`."""
    plain = sum(one.rss_bytes for one in processes)
    return plain if plain <= enough else sum(_pss_bytes(one) for one in processes)


def kill(leader: int) -> None:
    """End every process of a worker."""
    for _ in range(_ROUNDS):
        try:
            left = tree(leader)
        except OSError:
            with contextlib.suppress(*_GONE):
                os.killpg(leader, signal.SIGKILL)
            return
        if not left:
            return
        for one in left:
            with contextlib.suppress(*_GONE):
                os.kill(one.pid, signal.SIGKILL)


def _table() -> list[Process]:
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                # The name comes second, in brackets, and may hold anything.
                fields = file.read().rpartition(")")[2].split()
        except _GONE:
            continue
        if fields[0] not in "ZX":
            rss_bytes = int(fields[21]) * _PAGE_BYTES
            found.append(Process(int(entry), int(fields[1]), int(fields[3]), rss_bytes))
    return found


def _pss_bytes(one: Process) -> int:
    try:
        with open(f"/proc/{one.pid}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except _GONE:
        pass
    return one.rss_bytes
