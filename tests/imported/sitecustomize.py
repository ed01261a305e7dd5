"""On the path of what a test starts (`imported_once` in tests/conftest.py): in the place of a launcher's
fork server (quartet.local.forkserver) comes a fork of the process at SOCKET, which has the imports (once.py).

This process stays, with the pid that the launcher knows and its tether: the fork ends with it, and it with
the fork.
"""

import os
import sys

SOCKET = "QUARTET_TESTS_IMPORTED"


def handed_over(address: str) -> None:
    import json
    import signal
    import socket

    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)  # as a fork server does
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as tie:
        asked = {"modules": sys.orig_argv[3:], "environment": dict(os.environ), "folder": os.getcwd()}
        tie.connect(address)
        socket.send_fds(tie, [json.dumps(asked).encode()], [0, 1, 2])
        tie.recv(1)


if sys.orig_argv[1:3] == ["-m", "quartet.local.forkserver"] and os.environ.get(SOCKET):
    handed_over(os.environ[SOCKET])
    os._exit(0)
