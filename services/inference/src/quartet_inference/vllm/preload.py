"""What vLLM's cores import, for the server whose forks they are (forks.py)."""

import os

from quartet.kit.imports import uncollected
from setproctitle import setproctitle

# Before the imports: the title's place in memory is found by the environment, which they change.
setproctitle("quartet_inference: imports of vLLM's cores")
# OpenBLAS starts its threads when numpy is imported.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

with uncollected():
    from vllm.v1.engine import core  # noqa: F401
    from vllm.v1.worker import cpu_worker  # noqa: F401

    from quartet_inference.vllm import drawing  # noqa: F401
