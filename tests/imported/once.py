"""A process that imports what services need once for many launchers: `python once.py LISTENER MODULE...`.

In the place of each process that asks (sitecustomize.py), a fork server or a worker of an environment, comes
a fork of it, with the streams, the other descriptors, the environment and the folder of that process: the
same code, but for the imports. Between them is one that ends when either does, and says with what the fork
did; the kernel kills a fork when its parent dies (quartet.local.tether).

Beside the listener a file, `*.taken`, has a byte for each fork that had nothing left to import; another,
`*.left`, for each that had.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import traceback
from typing import NoReturn

from handover import ABOVE, MAX_DESCRIPTORS, PARENT
from quartet.local import forkserver
from quartet.local.tether import die_with

MAX_BYTES = 1 << 17  # of an environment


def serve(listener: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    parent = os.getpid()
    while True:
        tie, _ = listener.accept()
        said, descriptors, *_ = socket.recv_fds(tie, MAX_BYTES, MAX_DESCRIPTORS)
        if not said:  # killed before it could ask
            tie.close()
            continue
        asked = json.loads(said)
        how = "taken" if sys.modules.keys() >= set(asked["modules"]) else "left"
        with open(f"{listener.getsockname()}.{how}", "ab") as counted:
            counted.write(b".")
        if os.fork() == 0:
            die_with(parent)
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            between(
                tie, descriptors, asked["numbers"], asked["command"], asked["environment"], asked["folder"]
            )
        for descriptor in (tie.fileno(), *descriptors):
            os.close(descriptor)
        tie.detach()


def between(
    tie: socket.socket,
    descriptors: list[int],
    numbers: list[int],
    command: list[str],
    environment: dict[str, str],
    folder: str,
) -> None:
    """Ends with the fork or with the process whose place it takes."""
    this = os.getpid()
    if (fork := os.fork()) == 0:
        die_with(this)
        tie.close()
        above = [os.dup2(one, ABOVE + place) for place, one in enumerate(descriptors)]
        os.closerange(3, ABOVE)
        for number, descriptor in zip(numbers, above, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        theirs = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        become(command, list(theirs), this)
    for descriptor in (0, 1, 2, *descriptors):
        os.close(descriptor)
    folder_of_it = None
    if command[0] != forkserver.__name__:
        from quartet_envhost.own_folder import folder_of

        folder_of_it = folder_of(fork, environment)
    ready, _, _ = select.select([tie, os.pidfd_open(fork)], [], [])
    if tie in ready:
        os.kill(fork, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    if folder_of_it is not None:  # which the host would look for under another pid
        shutil.rmtree(folder_of_it, ignore_errors=True)
    if tie not in ready:
        tie.send(str(code).encode())
    os._exit(0)


def become(command: list[str], folders: list[str], parent: int) -> NoReturn:
    """What the interpreter makes of a command behind `-m`, where PYTHONPATH has these folders."""
    module, *arguments = command
    code = 1
    try:
        if module == forkserver.__name__:
            os.setpgid(0, 0)
            sys.path[:1] = [os.getcwd(), *folders]
            forkserver.main(arguments)
        else:
            os.setsid()
            sys.path[:1] = folders
            be_worker(module, arguments, parent)
        code = 0
    except SystemExit as ended:
        code = forkserver.exit_code(ended)
    except BaseException:  # noqa: BLE001 - this is where the interpreter would end
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


def be_worker(module: str, arguments: list[str], parent: int) -> None:
    """It dies with its parent, which is another one here."""
    from quartet_envhost.template import RANDOM

    sys.argv = [module, *(f"{PARENT}{parent}" if one.startswith(PARENT) else one for one in arguments)]
    forkserver.entitle(sys.executable, "-P", "-m", *sys.argv)
    for one in RANDOM:
        if one in sys.modules:
            sys.modules[one].seed()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # Before the imports, which change the environment: titles find their place by it.
    forkserver.entitle(*sys.orig_argv)
    forkserver.preload(sys.argv[2:])
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    serve(socket.socket(fileno=int(sys.argv[1])))
