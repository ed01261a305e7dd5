"""What the libraries that compute read from the environment, once, when they are imported."""

from __future__ import annotations

import os

from quartet.kit.accelerator import allocate_expandably
from quartet.kit.processor import bound_compiled_kernels, choose_numpy_kernels


def configure(threads: int) -> None:
    """What is set already stays. Once torch is imported only its children read it."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # NumPy's, for attention: its products are too small to share.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    choose_numpy_kernels()
    bound_compiled_kernels()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Micro-batches differ in their shapes: in segments of fixed size they would leave holes.
    allocate_expandably(os.environ)
