"""A process that imports what services need once, and becomes each of them by a fork.

Importing torch and transformers takes seconds of a core in every process. A fork of a process that has them
takes milliseconds, at a start and at a restart alike, and shares their memory.

1. The modules that its command names are imported first; then it reads requests, lines of JSON on stdin, and
   answers each: `{"forked": PID}`. When a child has ended it says `{"ended": PID, "code": CODE}`, negative
   for a signal. It imports nothing while it has children.
2. A forked service is as its command would be, `python -m MODULE ARGUMENT...`: that command as its title, a
   process group and a log of its own, and the environment that the launcher gave, whatever imports changed.
3. Children die with this process (see tether.py), and it ends with its stdin, or by SIGKILL: signals that ask
   for an end are for the services, which end in order.
4. It has one thread, however much it imported: a fork copies no others, and what they held stays held. Where
   it has more, or cannot fork, it answers `{"forked": 0}`.
5. A child ends with its main thread. What is registered for the interpreter's exit does not run, and threads
   that are left do not delay it.

What cannot be imported is left to the services, whose logs will say why; what imports print goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from typing import NoReturn, TextIO

from setproctitle import setproctitle, setthreadtitle

from quartet.kit.imports import uncollected
from quartet.local.tether import die_with

#: What a process may be asked to end with, or have inherited from whoever started the launcher.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
#: What libraries read the size of their thread pools from.
POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Request:
    """A service to become."""

    module: str
    arguments: list[str]
    log: str
    # Besides what this process was given.
    environment: dict[str, str]

    def line(self) -> bytes:
        """As it goes over the wire."""
        return json.dumps(asdict(self)).encode() + b"\n"


class Server:
    """What the process holds while it serves."""

    def __init__(self, requests: FileIO, answers: TextIO) -> None:
        self._requests = requests
        self._answers = answers
        self._children: dict[int, int] = {}  # pids by their descriptors
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """In the server: None, once its requests have ended. In each child: what it was asked to become."""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._children:
                    self._reap(key.fd)
                    continue
                line = self._requests.readline()
                if not line:
                    return None
                request = Request(**json.loads(line))
                if self._fork():
                    return request

    def _fork(self) -> bool:
        """Whether this is the child."""
        server, pid = os.getpid(), 0
        with contextlib.suppress(OSError):  # no memory, no more processes
            if len(os.listdir("/proc/self/task")) == 1:
                pid = os.fork()
                if pid == 0:
                    die_with(server)
                    self._close()
                    return True
                # Here, too: whoever reads the answer may signal the group before the child has run.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.setpgid(pid, pid)
                descriptor = os.pidfd_open(pid)
                self._children[descriptor] = pid
                self._selector.register(descriptor, selectors.EVENT_READ)
        self._answer(forked=pid)
        return False

    def _reap(self, descriptor: int) -> None:
        pid = self._children.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        self._answer(ended=pid, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def _answer(self, **said: int) -> None:
        print(json.dumps(said), file=self._answers)

    def _close(self) -> None:
        """In a child: nothing of the server is its own."""
        self._selector.close()
        for descriptor in self._children:
            os.close(descriptor)
        self._requests.close()
        self._answers.close()


def become(request: Request, environment: Mapping[str, str]) -> NoReturn:
    """Run the service in this process, and end it."""
    code = 1
    try:
        os.setpgid(0, 0)
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(request.log, os.O_WRONLY | os.O_APPEND)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(nothing)
        os.close(log)
        for one in SIGNALS:
            signal.signal(one, signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL)
        os.environ.clear()
        os.environ.update({**environment, **request.environment})
        entitle(sys.executable, "-m", request.module, *request.arguments)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # what is random of itself is so in each process
        sys.argv = [request.module, *request.arguments]
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = exit_code(ended)
    except BaseException:  # noqa: BLE001 - this is where the interpreter would end
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # a full disk
                stream.flush()
        # Taking torch apart object by object would take half a second. The kernel does it at once.
        os._exit(code)


def entitle(*command: str) -> None:
    """What `ps` and `top` tell of this process."""
    setproctitle(" ".join(command).encode(errors="replace").decode())
    setthreadtitle(os.path.basename(sys.executable))


def exit_code(ended: SystemExit) -> int:
    """As the interpreter has it: anything but a number is said, and is 1."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def preload(modules: Sequence[str]) -> None:
    """Import them, with one thread."""
    os.environ.update(dict.fromkeys(POOLS, "1"))
    with uncollected():
        for module in modules:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(module)


def main(modules: Sequence[str]) -> None:
    """The process of the server, and of each of its children."""
    for one in SIGNALS:
        # An end of children that nobody is to hear of could not be waited for.
        signal.signal(one, signal.SIG_DFL if one == signal.SIGCHLD else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Before the imports: the title's place in memory is found by the environment, which they change. Without
    # their names: who looks for a service shall find the service.
    entitle(sys.executable, "-m", "quartet.local.forkserver")
    environment = dict(os.environ)
    # What an import prints is no answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    preload(modules)
    request = Server(FileIO(os.dup(0)), answers).serve()
    if request is not None:
        become(request, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
