"""Standard streams that were closed for this process, that nobody reads any more, or that take no more.

1. What was closed (`>&-`) leads nowhere, and no other file gets its number, which any library may write to.
2. Once the reader of a stream has left (`| head`, a closed terminal), it leads nowhere from there on, and so
   do the others that led to the same place (`2>&1 |`).
3. What works goes on without what it only shows (`only_shown`, `say`), also where the disk under a stream is
   full: what does not fit is lost.
4. What a stream has no letters for (another locale, a name of bytes that are no text) is written as escapes.
5. Foreign text (of a model, an environment, a server) does to the terminal what letters do: `shown` writes
   what else would move its cursor, rename its window or fill its clipboard as escapes. `say` does so itself.
6. A stream that a script put in its place (a logger beside the terminal) needs what `print` asks for alone:
   `write` and `flush`.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

#: C0 but for tab and newline, DEL, and C1: what terminals take for commands.
_COMMANDS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def hold_closed() -> None:
    """Open what is closed. Before this process opens anything, for it takes the lowest numbers there are."""
    for name, mode in MODES.items():
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - for as long as this process lives
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def escape_unknown() -> None:
    """Let stdout write what its encoding lacks, as stderr does by itself."""
    # The second is that of the locale C, and escapes bytes alone.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def only_shown(stream: TextIO) -> Iterator[None]:
    """Around what writes there and has nothing else to do: that it cannot ends nothing."""
    with suppress(OSError):
        yield
    if has_no_reader(stream):
        unread(stream)


def shown(text: str) -> str:
    """Foreign text, as a terminal may be given it."""
    return text.translate(_COMMANDS)


def say(line: str, stream: TextIO) -> bool:
    """Print a line that is only shown. Whether anybody may read it."""
    known = getattr(stream, "encoding", None) or "utf-8"
    try:
        print(shown(line).encode(known, "backslashreplace").decode(known), file=stream, flush=True)
    except OSError:
        if has_no_reader(stream):
            unread(stream)
            return False
    return True


def has_no_reader(stream: TextIO) -> bool:
    """Whether it is a pipe whose other end is closed, and no other pipe that broke, or a closed terminal."""
    try:
        number = stream.fileno()
    except (io.UnsupportedOperation, AttributeError):  # no file of the system's
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def unread(stream: TextIO) -> None:
    """Nothing can be written to a stream any more: from here on it leads nowhere."""
    place = os.fstat(stream.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for one in {stream.fileno(), 1, 2}:
        if os.path.samestat(os.fstat(one), place):
            os.dup2(nowhere, one)
    os.close(nowhere)
