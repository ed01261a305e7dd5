"""Where a worker hangs: the Python stack of its process, which the front asks for before it ends it.

1. It comes through a file in memory that the two share: nothing that an environment prints is in it.
   faulthandler writes it, in the handler of SIGNAL, which needs neither the event loop nor the interpreter's
   lock, and costs nothing until it is asked.
2. Asking ends after ANSWER_S. A process that is stopped, that is in a call of the kernel which no signal
   ends, or whose environment handles SIGNAL itself has no stack to tell, and that is no fault.
3. It is bounded: faulthandler writes 100 threads of 100 frames, of which MAX_BYTES are read and
   MAX_STACK_CHARS are told.
4. The place is the innermost line of the environment's own code (own_code.py 1) in the thread of the event
   loop, which is the one that hangs; none where that is in no own code.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import re
import signal
from dataclasses import dataclass
from typing import Final, Protocol

from quartet_envhost.own_code import OwnFiles, place_of

# None that an environment, a debugger or a scheduler would use, and the same number for every libc.
SIGNAL: Final = signal.SIGRTMAX - 5
# Written within milliseconds of the process getting a processor, which takes longer where many want one.
ANSWER_S: Final = 2.0
# faulthandler marks no end: the stack is whole when so long nothing was added.
QUIET_S: Final = 0.1
# The event loop's thread is the oldest, which is written last; with 100 frames it has 110 kB at most.
MAX_BYTES: Final = 256 * 1024
# A stack has some 40 frames, of a hundred letters each.
MAX_STACK_CHARS: Final = 16_000

_HANGS: Final = "Current thread "
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# As faulthandler writes what is not ASCII.
_ESCAPED: Final = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}")


class Process(Protocol):
    """A child of this process, as asyncio has one that it started."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None until it has ended."""

    async def wait(self) -> int:
        """That code, once it has ended."""


@dataclass(frozen=True)
class Stack:
    """What a process was doing at a moment."""

    # "my_env/rewards.py:12 in exact", or empty.
    place: str
    # As faulthandler writes it, the thread that hangs first.
    text: str


def write_when_asked(fd: int, own: OwnFiles) -> None:
    """In the worker: from here on its stack can be asked for."""
    os.set_inheritable(fd, False)  # what it starts has no part in it
    faulthandler.register(SIGNAL, fd, all_threads=True)
    # What is not empty can be asked.
    os.write(fd, json.dumps({"package": own.package, "foreign": list(own.foreign)}).encode() + b"\n")


class StackFile:
    """The file, as the front has it."""

    def __init__(self) -> None:
        """Make it. Raises OSError."""
        self._file = open(os.memfd_create("worker-stack"), "rb", buffering=0)  # noqa: SIM115 - see close

    @property
    def fd(self) -> int:
        """By which the worker gets it."""
        return self._file.fileno()

    def close(self) -> None:
        """Once the process has ended."""
        self._file.close()

    async def ask(self, process: Process) -> Stack | None:
        """The stack of the process, or None where it does not tell (2)."""
        begin = os.fstat(self.fd).st_size
        if begin == 0:  # it has not got so far, or is of a release that tells none
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, SIGNAL)
        written, deadline = b"", asyncio.get_running_loop().time() + ANSWER_S
        while asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(QUIET_S)
            if process.returncode is not None:  # the file may be closed
                return None
            before, written = written, self._since(begin)
            if written == before and _HANGS.encode() in written:
                break
        if not written:
            return None
        try:
            own = json.loads(os.pread(self.fd, begin, 0).partition(b"\n")[0])
            files = OwnFiles(own["package"], own["foreign"])
        except (ValueError, KeyError, TypeError):  # the environment found the file, and wrote to it
            return None
        return read_stack(written.decode("ascii", "replace"), files)

    def _since(self, begin: int) -> bytes:
        size = os.fstat(self.fd).st_size
        first = max(begin, size - MAX_BYTES)
        return os.pread(self.fd, size - first, first)


def read_stack(written: str, own: OwnFiles) -> Stack:
    """What faulthandler wrote."""
    others, marked, rest = written.partition(_HANGS)
    hanging, _, after = rest.partition("\n\n")
    frames = map(_FRAME.fullmatch, _ESCAPED.sub(_letter, hanging).splitlines())
    told = [(frame[1], int(frame[2]), frame[3]) for frame in frames if frame is not None]
    place = next((place_of(*one) for one in told if own.has(one[0])), "")
    text = "\n".join(part.strip("\n") for part in (marked + hanging, others, after) if part.strip())
    return Stack(place, text if len(text) <= MAX_STACK_CHARS else f"{text[: MAX_STACK_CHARS - 1]}…")


def _letter(escaped: re.Match[str]) -> str:
    return chr(int(escaped[0][2:], 16))
