"""Products of rows with matrices."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

#: From so many rows on, the result of a row does not depend on how many there are (MKL, measured).
SUMMED_ALIKE = 4
#: Weights of which a single row's product takes microseconds either way.
SMALL_MATRIX = 1 << 18


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product, with the bits that the same row has among many.

    Matrix libraries sum a product of fewer rows in another order. One row alone keeps it where the matrix is
    large: there it costs half as much.
    """
    rows = len(x)
    if rows >= SUMMED_ALIKE or (rows == 1 and weight.numel() > SMALL_MATRIX):
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, SUMMED_ALIKE - rows)), weight, bias)[:rows]
