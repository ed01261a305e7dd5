"""This machine's accelerator, without importing torch: whether there is one, and how torch takes its memory.

A driver that is loaded has a device file; where there is none, torch finds no device either.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

from quartet.config import ConfigError

#: NVIDIA's, that of its boards with memory in common, AMD's, and Windows' under Linux.
DRIVERS: Final = tuple(map(Path, ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")))


#: Where torch reads how to allocate: the first wins, so what is said in an older one would be lost beside it.
ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def allocate_expandably(environment: MutableMapping[str, str]) -> None:
    """Segments that grow, for tensors that differ in shape; nothing where somebody said how to allocate.
    Before torch is imported."""
    if not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = "expandable_segments:True"


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
