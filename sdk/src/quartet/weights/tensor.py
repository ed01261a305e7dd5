"""A tensor as bytes: what the weight plane moves, without torch and without numpy.

1. `data` is contiguous and little-endian, exactly as safetensors stores it; its length agrees with dtype and
   shape.
2. `data` may be a view of memory that somebody else owns; whoever hands a Tensor over no longer changes
   that memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Bytes per element of every safetensors dtype that has a whole number of them.
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "BOOL": 1, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor; ValueError for a dtype that cannot be moved."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(sorted(DTYPE_BYTES))}")
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape {shape} has a negative extent")
    return math.prod(shape) * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes

    def __post_init__(self) -> None:
        # Flat bytes, so that slices and lengths mean bytes wherever the view came from.
        view = memoryview(self.data)
        if not view.c_contiguous:
            raise ValueError(f"a {self.dtype} tensor of shape {self.shape} is not contiguous; copy it first")
        # cast() refuses views with a zero extent; such a tensor has no bytes.
        object.__setattr__(self, "data", view.cast("B") if view.nbytes else memoryview(b""))
        size = tensor_bytes(self.dtype, self.shape)
        if view.nbytes != size:
            raise ValueError(
                f"a {self.dtype} tensor of shape {self.shape} has {size} bytes, not {view.nbytes}"
            )

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return len(self.data)
