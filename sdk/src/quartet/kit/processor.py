"""What libraries are told of the kernels by which they compute on a processor.

- NumPy's OpenBLAS chooses its kernels by the processor's model, and takes those for AVX2 where the model is
  newer than itself: half the speed on AMD's of 2024 (OpenBLAS 0.3.31).
- oneDNN compiles some for each shape, half a megabyte each, and keeps 1024; so does PyTorch, in a cache of
  its own.

What somebody set already stays. For before they are imported: each reads it once.
"""

from __future__ import annotations

import os
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
#: What the kernels for AVX-512 need.
_AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}


def choose_numpy_kernels(cpuinfo: Path = CPUINFO) -> None:
    """Tell OpenBLAS."""
    described = _first_processor(cpuinfo)
    if described.get("vendor_id") == "AuthenticAMD" and set(described.get("flags", "").split()) >= _AVX512:
        os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")


def bound_compiled_kernels() -> None:
    """Tell oneDNN and PyTorch how many to keep."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "512")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "128")


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    """Its lines; none where the system is no Linux on x86."""
    described: dict[str, str] = {}
    try:
        with cpuinfo.open(encoding="utf-8") as lines:
            for line in lines:
                if not line.strip():
                    break
                name, _, value = line.partition(":")
                described[name.strip()] = value.strip()
    except OSError:
        pass
    return described
