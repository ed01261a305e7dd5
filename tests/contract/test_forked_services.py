"""What trainer and inference import before a launcher forks them leaves a process that may be forked, and
services that are as they are alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks of a launcher are for Linux")

PRELOADED = """
import json, os, sys
from quartet.local.forkserver import preload
preload(["quartet_trainer.preload", "quartet_inference.preload"])
"""
SEEN = """
seen = {
    "threads": len(os.listdir("/proc/self/task")),
    "imported": [name in sys.modules for name in ("quartet_trainer.assembly", "quartet_inference.app")],
    "kernels": [os.environ[f"{cache}_CAPACITY"] for cache in ("ONEDNN_PRIMITIVE_CACHE", "LRU_CACHE")],
}
"""
ASKED = """
import huggingface_hub, uvloop
from quartet_inference import __main__ as service
from quartet_inference.config import InferenceConfig
before = huggingface_hub.is_offline_mode()
uvloop.run = lambda running: running.close()
service._run(InferenceConfig(model=sys.argv[1]))
print(json.dumps([seen, before, huggingface_hub.is_offline_mode()]))
"""


def told(code: str, *arguments: str, **environment: str) -> Any:
    """What a program says in its last line, after the imports of a fork server."""
    kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", PRELOADED + code, *arguments],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_imports_leave_one_thread_and_inference_then_never_asks_the_hub(tiny_model: Path) -> None:
    """A fork copies no other threads, and a lock that one of them held would never be freed."""
    seen, before, after = told(SEEN + ASKED, str(tiny_model), OMP_NUM_THREADS="2", OPENBLAS_NUM_THREADS="2")
    assert seen == {"threads": 1, "imported": [True, True], "kernels": ["512", "128"]}
    assert (before, after) == (False, True)
