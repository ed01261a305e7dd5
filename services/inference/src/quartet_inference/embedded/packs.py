"""Matrices in the order in which oneDNN's kernels read them.

1. A product with what `of` gives has the bits of one with the matrix itself. It is spared bringing all of
   the matrix into that order for each product, which with few rows is up to half of the time.
2. A copy is made for the first product after `forget`; together they take at most `max_bytes`, and matrices
   beyond that stay as they are.
3. Whoever changes a matrix in place calls `forget` before the next product.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: For which oneDNN chooses the order. With another number of rows it may choose another, and reorders then.
ROWS = 64


class Packs:
    """Copies of float32 matrices on a CPU. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        """Nothing is copied yet, nor ever where PyTorch has no oneDNN."""
        there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._max_bytes = max_bytes if there else 0
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._bytes = 0

    def of(self, weight: Tensor) -> Tensor:
        """The matrix [outputs, inputs] for a product by oneDNN."""
        held = self._copies.get(id(weight))
        if held is not None:
            return held[1]
        if self._bytes + weight.nbytes > self._max_bytes:
            return weight
        copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self._copies[id(weight)] = weight, copy  # with the matrix, whose id is nobody else's meanwhile
        self._bytes += weight.nbytes
        return copy

    def forget(self) -> None:
        """The matrices have changed."""
        self._copies.clear()
        self._bytes = 0
