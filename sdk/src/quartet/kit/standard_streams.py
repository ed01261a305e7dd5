"""Standard streams that were closed for this process, or that nobody reads any more.

1. What was closed (`>&-`) leads nowhere, and no other file gets its number, which any library may write to.
2. Once the reader of a stream has left (`| head`), it leads nowhere from there on, and so do the others that
   led to the same place (`2>&1 |`).
"""

from __future__ import annotations

import os
import select
import sys
from typing import TextIO

MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def hold_closed() -> None:
    """Open what is closed. Before this process opens anything, for it takes the lowest numbers there are."""
    for name, mode in MODES.items():
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - for as long as this process lives
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def has_no_reader(stream: TextIO) -> bool:
    """Whether it is a pipe whose other end is closed, and no other pipe that broke."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def unread(stream: TextIO) -> None:
    """The reader of a stream has left: a write was a BrokenPipeError."""
    place = os.fstat(stream.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for one in {stream.fileno(), 1, 2}:
        if os.path.samestat(os.fstat(one), place):
            os.dup2(nowhere, one)
    os.close(nowhere)
