"""How the thread of a script waits for what another thread or process does: in slices, between which it looks
after something else.

1. What has come, and a signal that no wait was interrupted by, is noticed after LOOK_SECONDS at the latest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

LOOK_SECONDS: Final = 0.2


def nothing(*_: object) -> None:
    """What is done meanwhile, or told, where nobody wants anything."""


def wait_in_slices(ended: threading.Event, look: Callable[[], object] = nothing) -> None:
    """Until that is set. A signal that comes between Python's last look and a wait interrupts no wait. `look`
    is called between two slices."""
    while not ended.wait(LOOK_SECONDS):
        look()
