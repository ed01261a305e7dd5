"""What trainer and inference import before a launcher forks them leaves a process that may be forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CODE = """
import json, os, sys
import quartet_trainer.preload, quartet_inference.preload
import torch
print(json.dumps({
    "threads": len(os.listdir("/proc/self/task")),
    "cuda": torch.cuda.is_initialized(),
    "imported": [name in sys.modules for name in ("quartet_trainer.assembly", "quartet_inference.app")],
    "kernels": os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"],
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks of a launcher are for Linux")
def test_the_imports_leave_one_thread() -> None:
    """A fork copies no others, and a lock that one of them held would never be freed."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "threads": 1,
        "cuda": False,
        "imported": [True, True],
        "kernels": "512",
    }
