"""How long to wait before what failed is tried again.

The bound doubles with every failure in a row, up to the longest pause, and the pause is drawn from the upper
half below it: who failed together does not come back together, and nobody comes back at once.
"""

from __future__ import annotations

import random

#: By so many doublings every bound has long been reached; a float has room for them.
MAX_DOUBLINGS = 30


def pause_s(failures: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait after a failure with so many in a row before it."""
    return random.uniform(0.5, 1.0) * min(longest_s, first_s * 2.0 ** min(failures, MAX_DOUBLINGS))
