"""Whether this machine has an accelerator, asked without importing torch.

A driver that is loaded has a device file; where there is none, torch finds no device either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from quartet.config import ConfigError

#: NVIDIA's, that of its boards with memory in common, AMD's, and Windows' under Linux.
DRIVERS: Final = tuple(map(Path, ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")))


def has_driver() -> bool:
    """Whether a driver is loaded."""
    return any(driver.exists() for driver in DRIVERS)


def check_device(device: str, key: str) -> None:
    """Refuse to compute where there is nothing. Errors: ConfigError."""
    if device == "cuda" and not has_driver():
        raise ConfigError(
            f'{key} = "cuda", but this machine has no GPU (no driver is loaded); set {key} = "cpu" or leave '
            "it out"
        )
