"""The folder of one worker: what its rollouts and servers put on this machine, for whom it ends to remove.

Verifiers removes each of these with its runtime, which a worker that is killed does not come to.

1. Worker and host name it alike, from what the kernel says of the process. No other process has that name,
   neither one that gets its number later nor one of another container or machine with the same home.
2. So the host removes it once no process of the worker is left (process.py), however it ended.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def name_of(pid: int) -> str:
    """What the folder of a process that has not been waited for yet is called. Raises OSError."""
    # The program's name comes second, in brackets, and may hold anything; the 22nd is when it was started.
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    numbered_in = os.stat("/proc/self/ns/pid").st_ino
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"worker-{pid}-{started}-{numbered_in}-{boot}"


def folder_of(pid: int, environment: Mapping[str, str]) -> Path:
    """Where it is, of a worker that was started with this environment (verifiers 0.4.0). Raises OSError."""
    try:
        home = Path(environment.get("HOME") or Path.home())
    except RuntimeError:  # as worker.py has it
        home = Path(tempfile.gettempdir())
    return home / ".cache" / "verifiers" / "runtimes" / "subprocess" / name_of(pid)
