"""The processor of this machine, for libraries that know it less well.

NumPy's OpenBLAS chooses its kernels by the processor's model, and takes those for AVX2 where the model is
newer than itself: half the speed on AMD's of 2024 (OpenBLAS 0.3.31).
"""

from __future__ import annotations

import os
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
#: What the kernels for AVX-512 need.
_AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}


def choose_numpy_kernels(cpuinfo: Path = CPUINFO) -> None:
    """Tell OpenBLAS, unless it is told already. For before NumPy is imported, which reads it once."""
    described = _first_processor(cpuinfo)
    if described.get("vendor_id") == "AuthenticAMD" and set(described.get("flags", "").split()) >= _AVX512:
        os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")


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
