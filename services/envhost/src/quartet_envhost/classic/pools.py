"""Threads and processes beside a classic environment: as many, and begun, as in Verifiers' own workers.

1. What the environment starts by `multiprocessing` begins as Python has it, or as the package says: on Linux
   by a fork, before Python 3.14. So a nested function can be run, what `load_environment` left in a module is
   there, and so is the child in milliseconds: its author's clock runs, and where that is over a right answer
   earns 0. A worker has threads, as Verifiers' own have, so a child may not use a connection of its parent,
   and none does: gRPC's handlers at a fork, of which children died, are off (quartet/__init__.py), and a
   child of `multiprocessing` ends without coming back.
2. Verifiers' own pool, in which MathRubric verifies, is of a fork server. Forked of a worker, at the first
   answer and beside whatever threads there are by then, a process of it may inherit a lock that one of them
   holds, and hang: after two minutes the answer is 0.0, a failure that is a reward. The server imports what
   they need, once.
3. There are threads for 512 calls (`asyncio.to_thread`), and pools of as many processes as Verifiers has for
   these.

Pinned to verifiers 0.3: MathRubric's pool is known by the name that it is registered by.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Final

from verifiers.legacy.utils import thread_utils

# As Verifiers' workers have it: twice as many as the rollouts that one has.
CONCURRENCY: Final = 512
_VERIFIES: Final = "math-verify-"
# What its processes import: most of the module that this one runs, and that of what they are to do.
_NEEDED: Final = ("quartet_envhost.loading", "verifiers.legacy.rubrics.math_rubric")


def scale() -> None:
    """Have as many threads and processes as Verifiers; on the event loop, before the environment is there."""
    register = thread_utils.register_executor

    def registered(name: str, executor: Executor, scaling_fn: Callable[[int], int] | None = None) -> None:
        if name.startswith(_VERIFIES) and isinstance(executor, ProcessPoolExecutor):
            server = multiprocessing.get_context("forkserver")
            server.set_forkserver_preload(list(_NEEDED))
            ProcessPoolExecutor.__init__(executor, max_workers=1, mp_context=server)  # nothing has begun
        register(name, executor, scaling_fn)

    thread_utils.register_executor = registered
    thread_utils.scale_executors(concurrency=CONCURRENCY)
