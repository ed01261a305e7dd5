"""Where the embedded engine computes, and in which type.

1. What is asked for is what is taken: "cuda" never falls back to a CPU. "auto" takes what there is, and the
   log says which.
"""

from __future__ import annotations

import structlog
import torch
from quartet.config import ConfigError

log = structlog.get_logger()


def chosen(wanted: str) -> torch.device:
    """The device that the configuration means. Errors: ConfigError."""
    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError(
            'embedded.device = "cuda", but torch finds no CUDA device; set embedded.device = "cpu" or mend '
            "the driver"
        )
    device = torch.device("cuda" if present and wanted != "cpu" else "cpu")
    log.info("engine_device", device=str(device), setting=wanted)
    return device


def dtype_on(device: torch.device, wanted: str) -> str:
    """The type that the configuration means there."""
    if wanted != "auto":
        return wanted
    return "float32" if device.type == "cpu" else "bfloat16"
