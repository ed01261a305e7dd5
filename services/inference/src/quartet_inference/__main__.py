"""`python -m quartet_inference [@ file.toml ...] [--key value ...] [--dry-run | --preflight]`."""

from __future__ import annotations

import os
import sys

import uvloop
from quartet.config import main
from quartet.kit import logs
from quartet.kit.accelerator import check_device
from quartet.kit.door import check_door
from quartet.kit.imports import uncollected
from quartet.kit.server import check_here
from quartet.kit.tracing import exporting

from quartet_inference.config import InferenceConfig
from quartet_inference.embedded import libraries
from quartet_inference.openai.library import check_library
from quartet_inference.vllm import environment, forks


def _run(config: InferenceConfig) -> None:
    logs.configure("inference", config.log_level)
    if config.engine == "vllm":
        environment.prepare(config.vllm.threads)
        forks.begin()
    else:
        libraries.configure(config.embedded.threads)
    # The hub is never asked; neither where its library was imported before, with a fork server.
    os.environ["HF_HUB_OFFLINE"] = "1"
    with uncollected():
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = True
        from quartet_inference.app import run

    with exporting("inference"):
        uvloop.run(run(config))


def _preflight(config: InferenceConfig) -> None:
    check_here(config.server)
    check_library(config.openai)
    check_door(config.openai, "openai.")
    if config.engine == "vllm":
        environment.check_here()
    else:
        check_device(config.embedded.device, "embedded.device")


if __name__ == "__main__":
    sys.exit(main(InferenceConfig, _run, preflight=_preflight))
