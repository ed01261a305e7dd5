"""An address of this machine at which no other process listens.

A port of 127.0.0.1 that was chosen or given back may be another process's before it is taken: tests run side
by side. Linux has all of 127.0.0.0/8 for this machine; elsewhere they take that chance.
"""

from __future__ import annotations

import os
import sys
from typing import Final

_OWN = f"127.{64 + (os.getpid() >> 16) % 64}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
LOOPBACK: Final = _OWN if sys.platform == "linux" else "127.0.0.1"
