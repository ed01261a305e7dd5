"""On a CPU vLLM's cores are forks of a process that has their imports (multiprocessing's fork server).

Importing vLLM takes ten seconds of a core in every process. The server imports while the service does, and a
core is a fork of it: a service starts in little more than half of the time.

1. The server is started by `begin`, and ends with this process; or with the first core, and ends with the
   last of those that may ask it, which are this process and its cores.
2. A core has the environment of whoever starts it, as one that is spawned. What is read at an import, as the
   number of OpenMP's threads, is of the moment at which the server was started: `environment.prepare` comes
   before.
3. The server has one thread when it forks: others would not be in a fork, and what they held would stay held.
4. Workers that share a model are spawned by their core all the same: vLLM tells each in its environment how
   many threads it has, which is read when torch is loaded. So are cores that are bound to a node of memory,
   which is done by their command, and those on a GPU, whose driver survives no fork.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from quartet_inference.vllm import environment

TETHER, IMPORTS = "quartet_inference.vllm.tethered", "quartet_inference.vllm.preload"


class Fork(ForkServerProcess):
    """A process of the server."""

    def start(self) -> None:
        """Start it, with the environment of this moment."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """In the fork."""
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update(self._environment)
        super().run()


class Forks(ForkServerContext):
    """What vLLM takes for multiprocessing."""

    Process = Fork


def context() -> Forks:
    """Whose processes are forks of the server."""
    multiprocessing.set_forkserver_preload([IMPORTS])
    return Forks()


def begin() -> None:
    """Have the server import, while this process does something else. For its main thread: what is tethered
    ends with the thread that starts it."""
    if environment.is_cpu_build():
        multiprocessing.set_forkserver_preload([TETHER, IMPORTS])
        forkserver.ensure_running()


@contextmanager
def cores(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Those that vLLM starts meanwhile for these AsyncEngineArgs are forks, where they can be."""
    from vllm.v1.engine import utils

    own = utils.get_mp_context
    if environment.is_cpu_build() and not arguments.get("numa_bind"):
        utils.get_mp_context = context
    try:
        yield
    finally:
        utils.get_mp_context = own
