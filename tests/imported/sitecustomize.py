"""On the path of what a test starts (`imported_once` in tests/conftest.py): in the place of a launcher's
fork server (quartet.local.forkserver), and of a worker of an environment host, comes a fork of a process that
has the imports (once.py), which listens beside SOCKET.

This process stays, with the pid that others know, and dies with who started it: the fork ends with it, and it
with the fork, as that does. What is looked at by its pid is this one: memory, processes that a worker
started, its stack. Nothing about these is tested with the imports of others.

A host's template cannot be one: its forks would be no children of the host. It says so, and workers come by
themselves.
"""

import os
import sys

SOCKET = "QUARTET_TESTS_IMPORTED"


def handed_over(address: str, command: list[str], modules: list[str]) -> None:
    import json
    import signal
    import socket

    from handover import ABOVE, MAX_DESCRIPTORS

    listed = sorted(map(int, os.listdir("/proc/self/fd")))
    numbers = [number for number in listed if os.path.exists(f"/proc/self/fd/{number}")]
    assert len(numbers) <= MAX_DESCRIPTORS and numbers[-1] < ABOVE
    place = {"environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as tie:
        tie.connect(address)
        asked = {"command": command, "modules": modules, "numbers": numbers, **place}
        socket.send_fds(tie, [json.dumps(asked).encode()], numbers)
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, signal.SIG_IGN)  # as a fork server does
        for number in numbers:
            os.close(number)
        code = int(tie.recv(16) or -signal.SIGKILL)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def refused(line: int) -> None:
    import socket

    socket.socket(fileno=line).send(b'{"unfit": "tests have the imports elsewhere"}')
    os._exit(0)


def main(address: str) -> None:
    from handover import LINE, OF_WORKERS, PARENT, of_interpreter

    match sys.orig_argv[1:]:
        case ["-m", "quartet.local.forkserver" as module, *modules]:
            handed_over(address, [module, *modules], modules)
        case ["-P", "-m", "quartet_envhost.worker" as module, *arguments]:
            address += of_interpreter(sys.prefix)
            if os.path.exists(address):
                from quartet.local.tether import die_with

                line, parent = (
                    int(one.removeprefix(name)) for name, one in zip((LINE, PARENT), arguments, strict=False)
                )
                if "--template" in arguments:
                    refused(line)
                die_with(parent)
                handed_over(address, [module, *arguments], OF_WORKERS)


if os.environ.get(SOCKET):
    main(os.environ[SOCKET])
