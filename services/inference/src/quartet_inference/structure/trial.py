"""Compile a grammar in this process, which may die of it: run as a script, by `compiling`.

llguidance compiles by recursion, and takes minutes and gigabytes for some grammars of a few bytes. A thread
can neither survive the one nor be stopped in the other.

1. The grammar comes on stdin. Exit code 0: it was compiled, or refused with a reason; who compiles it again
   in a process with more stack and more memory lives. TOO_MUCH, or a signal: who knows.
2. It takes at most CPU_SECONDS of a processor and MEMORY_BYTES, and half the stack that threads have by
   default.
"""

from __future__ import annotations

import resource
import sys
import threading

#: Of a schema of 100,000 characters a tenth of that is needed.
CPU_SECONDS = 2
MEMORY_BYTES = 1 << 30
STACK_BYTES = 4 << 20
TOO_MUCH = 3


def main() -> int:
    """The exit code."""
    for kind, most in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, highest = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if highest == resource.RLIM_INFINITY else min(most, highest), highest))
    codes: list[int] = []
    grammar = sys.stdin.buffer.read().decode()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: codes.append(_compiled(grammar)))
    thread.start()
    thread.join()
    return codes[0] if codes else 1


def _compiled(grammar: str) -> int:
    from llguidance import LLMatcher, LLTokenizer

    try:
        LLMatcher(LLTokenizer("byte"), grammar, log_level=0).compute_bitmask()
    except MemoryError:
        return TOO_MUCH
    return 0


if __name__ == "__main__":
    sys.exit(main())
