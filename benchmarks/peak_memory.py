"""The highest memory of a measurement in its own process: resident memory, or allocated memory on CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

POLL_SECONDS = 0.005
GIB = 2**30


def in_own_process(script: str, way: str) -> dict[str, float]:
    """What one way measures."""
    command = [sys.executable, script, *sys.argv[1:], "--way", way]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


class Watch:
    """The highest memory since it began."""

    def __init__(self, device: object) -> None:
        import torch

        self._cuda = getattr(device, "type", "") == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        self._before = self._peak = resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _poll(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self._peak = max(self._peak, resident())

    def stop(self) -> int:
        """Bytes above the beginning."""
        if self._cuda:
            import torch

            return int(torch.cuda.max_memory_allocated()) - self._before
        self._ended.set()
        self._thread.join()
        return self._peak - self._before


def resident() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
