"""Ids that nothing else has: of requests, answers and calls. They are no secrets.

They are made without asking the system each time, as `uuid` does: that lets other threads run, and the event
loop gets the interpreter back when a busy one, as the engine's, gives it up, which takes up to 5 ms.
"""

from __future__ import annotations

import os
import random

_RANDOM = random.Random()  # seeded by the system, and nobody else's
# Services on one machine are forks of one process that may have this module.
os.register_at_fork(after_in_child=_RANDOM.seed)


def fresh_id() -> str:
    """32 hexadecimal digits."""
    return f"{_RANDOM.getrandbits(128):032x}"
