"""A tool server on this machine, started at the pace of a worker: `python -m quartet_envhost.v1.tool_server
MODULE` is `python -m MODULE`, which Verifiers would have started.

Importing Verifiers is nearly all that it does before it answers, and a rollout waits for servers of its own.
With Anthropic's package deferred (deferred.py), and garbage looked for as seldom as in a worker (garbage.py),
that takes half the CPU time.

1. The module runs as by that command, and nothing is imported before it but for what is deferred.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from quartet_envhost.garbage import look_seldom


def soon(command: Sequence[str]) -> list[str]:
    """The command that starts the same server sooner; the same, where it is another than Verifiers'."""
    match list(command):
        case [sys.executable, "-m", module, *arguments]:
            return [sys.executable, "-m", __name__, module, *arguments]
        case other:
            return other


def main() -> None:
    """Be the server that the arguments name."""
    look_seldom()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
