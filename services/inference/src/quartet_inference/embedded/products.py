"""Products of rows with matrices.

1. In float32 they are oneDNN's: PyTorch takes MKL for these, whose kernels for processors that are not
   Intel's have half the speed. In other dtypes they are PyTorch's own.
2. In float32 the bits of a row do not depend on how many rows there are, nor on what else the matrix holds
   (docs/numerics.md), but for one row alone with a large matrix.
"""

from __future__ import annotations

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: From so many rows on, the result of a row does not depend on their number (measured: 2 in oneDNN, 4 in MKL)
SUMMED_ALIKE = 4
#: Weights of which a single row's product takes microseconds either way.
SMALL_MATRIX = 1 << 18


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product in float32 of [rows, inputs], with the bits that the same row has among many.

    Matrix libraries sum a product of fewer rows in another order. One row alone keeps it where the matrix is
    large: there it costs half as much.
    """
    rows = len(x)
    if rows >= SUMMED_ALIKE or (rows == 1 and weight.numel() > SMALL_MATRIX):
        return _product(x, weight, bias)
    return _product(F.pad(x, (0, 0, 0, SUMMED_ALIKE - rows)), weight, bias)[:rows]


def use(model: nn.Module) -> None:
    """Let the linear modules of a model in float32 compute so, where transformers' own code runs it."""
    for module in model.modules():
        # Subclasses have code of their own.
        if type(module) is nn.Linear and module.weight.dtype == torch.float32:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    found = linear(x.reshape(-1, x.shape[-1]), module.weight, module.bias)
    return found.view(*x.shape[:-1], -1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return F.linear(x, weight, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found
