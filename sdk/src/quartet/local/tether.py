"""Ties a child to its parent, then becomes the program: `python tether.py PARENT_PID PROGRAM ARGUMENT...`.

1. The program is killed by the kernel when the process that started it dies, however it dies (Linux:
   PR_SET_PDEATHSIG).
2. It keeps the pid that the parent got, because it replaces this script by exec.
3. Where the folder that it would run in was deleted meanwhile, it runs in the root: torch does not load
   without one, so no service could be started again.

A script of its own and not a `preexec_fn`: running Python between fork and exec is unsafe in a process with
threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tethered(program: list[str]) -> list[str]:
    """The command of a program that dies with this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *program]


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies; end it where that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(parent: int, program: list[str]) -> None:
    """Tie this process, and become the program."""
    die_with(parent)
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
