"""What the libraries that compute read from the environment, once, when they are imported."""

from __future__ import annotations

import os

from quartet.kit.accelerator import allocate_expandably
from quartet.kit.processor import bound_compiled_kernels, choose_numpy_kernels


def configure(threads: int) -> None:
    """torch's thread pool spins at barriers and starves the neighbours. Once torch is imported only its
    children read it.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # NumPy's, for the decode step: its products are too small to share.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    choose_numpy_kernels()
    bound_compiled_kernels()
    # Of a GPU: the cache of keys grows, and passes differ in their shapes. In segments of fixed size they
    # would leave holes.
    allocate_expandably(os.environ)
