"""Large imports at the start of a process, without the garbage collector.

torch, transformers and verifiers make a million objects while they are imported, nearly all of which stay.
The collector looks through them again and again: a third of the import's CPU, and a tenth of a second at each
full collection later.

1. Nothing is collected inside the block, and what is there at its end is never looked through again.
2. After the block the collector runs as before.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For import statements, and what makes as little else as they do: garbage that the block leaves in
    cycles is kept."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
