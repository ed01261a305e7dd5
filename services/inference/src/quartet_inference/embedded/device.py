"""Where the embedded engine computes, and in which type.

1. What is asked for is what is taken: "cuda" never falls back to a CPU. "auto" takes what there is, and the
   log says which.
2. A version, an adapter, a score or a step that the device has no room for is OVERLOADED, as another process
   there may give back what it takes now. A canary that was not scored for that says nothing of the weights.
3. A device that is lost ends the engine: every later step would fail, and the replica would go on answering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import structlog
import torch
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.accelerator import has_driver

T = TypeVar("T")

log = structlog.get_logger()


def chosen(wanted: str) -> torch.device:
    """The device that the configuration means. Errors: ConfigError."""
    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError(
            'embedded.device = "cuda", but torch finds no CUDA device; set embedded.device = "cpu" or mend '
            "the driver"
        )
    if wanted == "auto" and not present and has_driver():
        log.warning("no_cuda", why="a GPU's driver is loaded, but this torch finds no CUDA device")
    device = torch.device("cuda" if present and wanted != "cpu" else "cpu")
    log.info("engine_device", device=str(device), setting=wanted)
    return device


def dtype_on(device: torch.device, wanted: str) -> str:
    """The type that the configuration means there."""
    if wanted != "auto":
        return wanted
    return "float32" if device.type == "cpu" else "bfloat16"


def is_lost(device: torch.device) -> bool:
    """Whether no work of this process ends there any more, asked after a fault: on a GPU one kernel's takes
    everything with it that comes later."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def within_memory(job: Callable[[], T]) -> T:
    """Do a job. Errors: OVERLOADED where the device has no room for it, and those of the job."""
    try:
        return job()
    except torch.OutOfMemoryError as error:
        why = str(error).partition("\n")[0].rstrip(".")
    # Outside of the handler: until its end the error holds on to all that the job did.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise QuartetError(
        "OVERLOADED",
        f"the memory of the device does not reach ({why}); lower embedded.kv_cache_bytes, or give the engine "
        "a device of its own",
    )
