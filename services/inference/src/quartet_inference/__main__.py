"""`python -m quartet_inference [@ file.toml ...] [--key value ...] [--dry-run | --preflight]`."""

from __future__ import annotations

import os
import sys

import uvloop
from quartet.config import main
from quartet.kit import logs
from quartet.kit.door import check_door
from quartet.kit.imports import uncollected
from quartet.kit.processor import choose_numpy_kernels
from quartet.kit.server import check_here

from quartet_inference.config import InferenceConfig
from quartet_inference.vllm import environment


def _run(config: InferenceConfig) -> None:
    logs.configure("inference", config.log_level)
    # Before torch is loaded: its thread pool spins at barriers and starves the neighbours. The hub is
    # never asked.
    if config.engine == "vllm":
        environment.prepare(config.vllm.threads)
    else:
        os.environ["OMP_NUM_THREADS"] = str(config.embedded.threads)
        # NumPy's, for the decode step: its products are too small to share.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        choose_numpy_kernels()
        # oneDNN's compiled kernels, half a megabyte each.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "512")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with uncollected():
        from quartet_inference.app import run

    uvloop.run(run(config))


def _preflight(config: InferenceConfig) -> None:
    check_here(config.server)
    check_door(config.openai, "openai.")
    if config.engine == "vllm":
        environment.check_here()


if __name__ == "__main__":
    sys.exit(main(InferenceConfig, _run, preflight=_preflight))
