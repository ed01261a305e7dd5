"""A process that has imported Verifiers, and becomes each worker by a fork.

Importing Verifiers takes seconds of a core in every process. A fork of a process that has it takes
milliseconds, and shares its memory.

1. It imports what all environments of its interpreter's Verifiers need, and nothing of one. Then it answers
   requests on its line. One brings what the worker is to have: its line, the file of its stack, and where
   what it prints goes.
2. A forked worker is as a spawned one: a child of the front, which adopts it (templates.py), and dies with
   it; a session of its own; random numbers of its own, but for the seed of hashes. It has nothing of this
   process open, whose end is nothing to it.
3. What keeps it from being forked it says at once: imports that fail, threads, which a fork would lose,
   descriptors, which workers would share, or processes, which would be no worker's. Threads whose library
   ends them at a fork and starts them when it needs them, as OpenBLAS does, are no reason.
4. Where packages were installed or removed since it began to import, it asks to be started anew.
5. It ends with its line, and dies with the front.
6. A request has one answer: the worker's, or that of whoever could not fork. There is none where who is
   between was killed: the template ends then, so that the line does, unless there is a worker that answers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Final

from quartet.local.forkserver import entitle
from quartet.local.tether import die_with

from quartet_envhost import loading, processes
from quartet_envhost.spawning import TEMPLATE

# A request has descriptors and no text.
MAX_REQUEST_BYTES: Final = 64
DESCRIPTORS: Final = 3
# What an import fails with may quote a page, and an answer is one packet.
MAX_WHY_CHARS: Final = 1_000
# Modules with a generator that was seeded as they were imported. `random` sees to its own, and what asks the
# system has no state.
RANDOM: Final = ("numpy.random", "sympy.core.random")
# Who was between a worker and the front is gone before a worker has looked twice.
BETWEEN_S: Final = 0.0005
_INSTALLED: Final = {"site-packages", "dist-packages"}


def serve(fd: int, front: int) -> int | None:
    """In the template: None, once it has to end. In each worker: the descriptor of its line."""
    entitle(sys.executable, *sys.orig_argv[1:])  # before imports change the environment, beside which it is
    line = socket.socket(fileno=fd)
    before = _installed()
    if why := _unfit(fd):
        _say(line, unfit=why[:MAX_WHY_CHARS])
        return None
    _say(line, ready="")
    while True:
        _, given, _, _ = socket.recv_fds(line, MAX_REQUEST_BYTES, DESCRIPTORS)
        if not given:
            return None
        for one in given:
            os.set_inheritable(one, False)
        if _installed() != before:
            _say(line, renew="packages were installed or removed")
            return None
        match _fork(line):
            case True:
                return _worker(line, front, *given)
            case None:
                return None
        for one in given:
            os.close(one)


def _worker(line: socket.socket, front: int, own: int, stack: int, output: int) -> int:
    """Be a worker, and say so."""
    if os.getppid() != front:
        with contextlib.suppress(OSError):  # it is gone
            _say(line, unfit="its workers are not adopted")
        os._exit(1)
    die_with(front)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    for module in RANDOM:
        if module in sys.modules:
            sys.modules[module].seed()
    importlib.invalidate_caches()
    for arguments in (sys.argv, sys.orig_argv):
        arguments[:] = [one for one in arguments if one != TEMPLATE]
    entitle(sys.executable, *sys.orig_argv[1:])
    os.setsid()  # last: the front ends the template's session where it was not answered
    _say(line, forked=[os.getpid(), stack])
    line.close()
    return own


def _fork(line: socket.socket) -> bool | None:
    """Whether this is the worker, whose parent has ended; None where the template has to end (6)."""
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        between = os.fork()
    except OSError as error:
        _say_failed(line, error)
        return False
    if between == 0:
        between = os.getpid()
        try:
            worker = os.fork()
        except OSError as error:
            _say_failed(line, error)
            os._exit(0)
        if worker:
            os._exit(0)
        while os.getppid() == between:
            time.sleep(BETWEEN_S)
        return True
    try:
        _, status = os.waitpid(between, 0)
    except ChildProcessError:  # whoever started the front ignores the ends of children, and so does this
        return False
    return None if status else False


def _unfit(line: int) -> str:
    """Import, and say why no worker can be forked of this process; empty where one can."""
    try:
        loading.import_ahead()
    except Exception as error:  # noqa: BLE001 - of Verifiers or of what it needs; workers will say it in full
        return f"its imports fail: {type(error).__name__}: {error}"
    if _threads() > 1:
        trial = os.fork()
        if trial == 0:
            os._exit(0)
        os.waitpid(trial, 0)
    if (threads := _threads()) > 1:
        return f"its imports have started threads ({threads - 1})"
    if left := _open() - {0, 1, 2, line}:
        named = ", ".join(os.readlink(f"/proc/self/fd/{one}") for one in sorted(left))
        return f"its imports have left descriptors open: {named}"
    if (started := len(processes.tree(os.getpid())) - 1) > 0:
        return f"its imports have left processes running ({started})"
    return ""


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _open() -> set[int]:
    numbers = map(int, os.listdir("/proc/self/fd"))
    # One was that of the list itself.
    return {one for one in numbers if os.path.exists(f"/proc/self/fd/{one}")}


def _installed() -> dict[str, int]:
    """When the folders of this interpreter's packages were changed last."""
    folders = (one for one in sys.path if Path(one).name in _INSTALLED and os.path.isdir(one))
    return {one: os.stat(one).st_mtime_ns for one in folders}


def _say_failed(line: socket.socket, error: OSError) -> None:
    """No memory, or no more processes."""
    _say(line, failed=f"its template cannot be forked: {error.strerror}")


def _say(line: socket.socket, **said: str | list[int]) -> None:
    line.send(json.dumps(said).encode())
