"""A process that a function of a script forked, and that comes back out of it, ends: it is not the script.

What called the function is in it once more, and whoever waits for the function does so in the other one.
"""

from __future__ import annotations

import os


def leave(process: int, error: BaseException | None = None) -> None:
    """Called where a function has returned, or raised: any process but the one that called it ends, with the
    exit code of a script that ends so."""
    if os.getpid() != process:
        code = error.code if isinstance(error, SystemExit) else int(error is not None)
        os._exit(code if isinstance(code, int) else int(code is not None))
