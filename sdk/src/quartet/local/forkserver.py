"""A process that imports what services need once, and becomes each of them by a fork.

Importing torch and transformers takes seconds of a core in every process. A fork of a process that has them
takes milliseconds, at a start and at a restart alike, and shares their memory.

1. Requests are lines of JSON on stdin, answered one by one on stdout: `{"forked": PID}`. When a child has
   ended it says `{"ended": PID, "code": CODE}`, negative for a signal.
2. A forked service is as its command would be, `python -m MODULE ARGUMENT...`: that command as its title, a
   process group, log, arguments and environment of its own.
3. Children die with this process (see tether.py), and it ends with its stdin.
4. It has one thread, however much it imported: a fork copies no others. It runs nothing of a service.
5. A child ends with its main thread: what runs at exit, and threads that are left, do not delay it.

What cannot be imported is left to the child, whose log will say why.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import selectors
import sys
import traceback
from dataclasses import asdict, dataclass
from typing import NoReturn, TextIO

from setproctitle import getproctitle, setproctitle, setthreadtitle

from quartet.kit.imports import uncollected
from quartet.local.tether import die_with


@dataclass(frozen=True)
class Request:
    """A service to become."""

    module: str
    arguments: list[str]
    #: The module that imports what it needs.
    preload: str
    log: str
    # Besides what this process has.
    environment: dict[str, str]

    def line(self) -> bytes:
        """As it goes over the wire."""
        return json.dumps(asdict(self)).encode() + b"\n"


def serve(answers: TextIO) -> Request | None:
    """In the server: None, once stdin has ended. In each child: what it was asked to become."""
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    children: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in children:
                    pid = children.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    print(json.dumps({"ended": pid, "code": code}), file=answers)
                    continue
                line = requests.readline()
                if not line:
                    return None
                request = Request(**json.loads(line))
                with contextlib.suppress(Exception), uncollected():
                    importlib.import_module(request.preload)
                server = os.getpid()
                pid = os.fork()
                if pid == 0:
                    die_with(server)
                    for descriptor in children:
                        os.close(descriptor)
                    requests.close()
                    answers.close()
                    return request
                # Here, too: whoever reads the answer may signal the group before the child has run.
                with contextlib.suppress(PermissionError, ProcessLookupError):
                    os.setpgid(pid, pid)
                descriptor = os.pidfd_open(pid)
                children[descriptor] = pid
                selector.register(descriptor, selectors.EVENT_READ)
                print(json.dumps({"forked": pid}), file=answers)


def become(request: Request) -> NoReturn:
    """Run the service in this process, and end it."""
    os.setpgid(0, 0)
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(request.log, os.O_WRONLY | os.O_APPEND)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    os.environ.update(request.environment)
    setproctitle(" ".join([sys.executable, "-m", request.module, *request.arguments]))
    setthreadtitle(os.path.basename(sys.executable))
    sys.argv = [request.module, *request.arguments]
    code = 1
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = exit_code(ended)
    except BaseException:  # noqa: BLE001 - this is where the interpreter would end
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Taking torch apart object by object would take half a second. The kernel does it at once.
        os._exit(code)


def exit_code(ended: SystemExit) -> int:
    """As the interpreter has it: anything but a number is said, and is 1."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def main() -> None:
    # Its place in memory is found by the environment, which imports change.
    getproctitle()
    # What an import prints is no answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = serve(answers)
    if request is not None:
        become(request)


if __name__ == "__main__":
    main()
