"""A process that imports what services need once for many launchers: `python once.py LISTENER MODULE...`.

In the place of each fork server that asks (sitecustomize.py) comes a fork of it, with the streams, the
environment and the folder of that process: the same code, but for the imports. Between them is one that ends
when either does, and the kernel kills the fork server, and its services, when their parent dies
(quartet.local.tether).

Beside the listener a file, `*.taken`, has a byte for each fork that had nothing left to import.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

from quartet.local import forkserver
from quartet.local.tether import die_with

MAX_BYTES = 1 << 17  # of an environment


def serve(listener: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    parent = os.getpid()
    while True:
        tie, _ = listener.accept()
        asked, streams, *_ = socket.recv_fds(tie, MAX_BYTES, 3)
        if not asked:  # killed before it could ask
            tie.close()
            continue
        if sys.modules.keys() >= set(json.loads(asked)["modules"]):
            with open(f"{listener.getsockname()}.taken", "ab") as taken:
                taken.write(b".")
        if os.fork() == 0:
            die_with(parent)
            listener.close()
            between(tie, streams, **json.loads(asked))
        for descriptor in (tie.fileno(), *streams):
            os.close(descriptor)
        tie.detach()


def between(
    tie: socket.socket, streams: list[int], modules: list[str], environment: dict[str, str], folder: str
) -> None:
    """Ends with the fork server or with the process whose place it takes."""
    this = os.getpid()
    if (server := os.fork()) == 0:
        die_with(this)
        tie.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        theirs = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:1] = [folder, *theirs]  # as -m has it
        forkserver.main(modules)
        os._exit(0)
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    select.select([tie, os.pidfd_open(server)], [], [])
    os._exit(0)


if __name__ == "__main__":
    # Before the imports, which change the environment: titles find their place by it.
    forkserver.entitle(*sys.orig_argv)
    forkserver.preload(sys.argv[2:])
    serve(socket.socket(fileno=int(sys.argv[1])))
