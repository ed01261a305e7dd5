"""How seldom workers and tool servers look for garbage. It imports nothing large, as neither may so early."""

from __future__ import annotations

import gc
from typing import Final

# Rollouts under way are many small objects, nearly none of them garbage; looking through them at Python's own
# thresholds is a sixth of a rollout's CPU. What a cycle holds waits for so many objects instead, some 20 MiB.
GC_THRESHOLDS: Final = (100_000, 20, 50)


def look_seldom() -> None:
    """In this process, from here on."""
    gc.set_threshold(*GC_THRESHOLDS)
