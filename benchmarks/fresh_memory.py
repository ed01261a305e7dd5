"""Memory that is fresh to a process, and at hand to its machine.

Where a hypervisor takes free memory back (page reporting), getting it again takes up to five seconds per GiB,
or nothing, depending on how long ago it was freed: chance, and nothing that a benchmark is about.
"""

from __future__ import annotations

import numpy as np


def bring(size: int) -> None:
    """See to it that the machine has so many bytes of free memory at hand: touch them, and free them."""
    np.ones(size, np.uint8)
