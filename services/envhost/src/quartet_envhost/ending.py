"""The end of a worker: what an interpreter does for others when it exits, without what it does for itself.

Taking an interpreter apart touches every object. Those of a fork lie in pages that it shares with its
template, each of which the kernel copies first: more CPU than loading most environments takes.

1. Threads that are no daemons are waited for, what is registered for the exit (`atexit`) runs, as Verifiers'
   own clean-up is, and what was printed is written.
2. Then the process ends, with code 0. What still lives is not told of it (`__del__`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import Any, NoReturn


def end() -> NoReturn:
    """As said above, in the main thread."""
    threads: Any = threading
    threads._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk; closed by the environment
            stream.flush()
    os._exit(0)
