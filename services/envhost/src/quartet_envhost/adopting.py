"""Descendants whose parent ends become children of this process, for the moment in which a template forks.

1. They do while somebody is inside `adopting`, and not for longer: tools that outlive who started them are
   for the system to wait for.
2. Those that came in such a moment all the same are waited for, so that the process table does not fill up:
   who has ended, is of another session than this process, and is there COLLECT_S later. What this process
   started itself was collected by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Final

# Whoever started a child hears of its end at once; on a busy machine, in a moment.
COLLECT_S: Final = 5.0
_PR_SET_CHILD_SUBREAPER: Final = 36

_inside = 0


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """See 1. In the thread of the event loop."""
    global _inside
    _inside += 1
    _be_subreaper(True)
    try:
        yield
    finally:
        _inside -= 1
        _be_subreaper(_inside > 0)
        if ended := _ended():
            asyncio.get_running_loop().call_later(COLLECT_S, _collect, ended)


def _collect(before: set[tuple[int, int]]) -> None:
    for pid, _ in before & _ended():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _ended() -> set[tuple[int, int]]:
    """Children of other sessions that nobody has waited for: numbers, and when they began."""
    found = set()
    with contextlib.suppress(FileNotFoundError):  # a kernel that does not tell them
        own = os.getpid()
        with open(f"/proc/{own}/task/{own}/children") as file:
            children = file.read().split()
        for child in children:
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),
                open(f"/proc/{child}/stat") as file,
            ):
                # The name comes second, in brackets, and may hold anything.
                fields = file.read().rpartition(")")[2].split()
                if fields[0] == "Z" and int(fields[3]) != os.getsid(0):
                    found.add((int(child), int(fields[19])))
    return found


def _be_subreaper(yes: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)
