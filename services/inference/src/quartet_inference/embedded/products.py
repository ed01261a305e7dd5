"""Products of rows with matrices.

1. In float32 on a CPU they are oneDNN's: PyTorch takes MKL for these, whose kernels for processors that are
   not Intel's have half the speed. In other dtypes and on other devices they are PyTorch's own, and so are
   those of modules that are no plain nn.Linear.
2. Of the first the bits of a row do not depend on how many rows there are, nor on what else the matrix holds
   (docs/numerics.md), but for one row alone with a large matrix.
3. Rows are filled up to one of SIZES_PER_DOUBLING sizes between a number and its double: oneDNN compiles
   kernels for each, which take it a millisecond and half a megabyte.
4. Logits of a model that computes in a narrow dtype are float32, as the trainer's are: bfloat16 would round
   one of 20 to a multiple of an eighth.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quartet_inference.embedded.packs import Packs

#: From so many rows on, the result of a row does not depend on their number (measured: 2 in oneDNN, 4 in MKL)
SUMMED_ALIKE = 4
#: At most an eighth of the rows is there for it.
SIZES_PER_DOUBLING = 8
#: Weights of which a single row's product takes microseconds either way.
SMALL_MATRIX = 1 << 18
#: Of a matrix that is widened.
PART_ELEMENTS = 1 << 20
NARROW = frozenset({torch.bfloat16, torch.float16})


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packs: Packs | None = None) -> Tensor:
    """The product of [rows, inputs]; in float32 with the bits that the same row has among many.

    Matrix libraries sum a product of fewer rows in another order. One row alone keeps it where the matrix is
    large: there it costs half as much, from the matrix as it is. `packs` has the others in order.
    """
    if not _is_onednns(x):
        return F.linear(x, weight, bias)
    rows = len(x)
    alone = rows == 1 and weight.numel() > SMALL_MATRIX
    if packs is not None and not alone:
        weight = packs.of(weight)
    size = rows if alone else max(SUMMED_ALIKE, size_of(rows, SIZES_PER_DOUBLING))
    if size == rows:
        return _product(x, weight, bias)
    return _product(F.pad(x, (0, 0, 0, size - rows)), weight, bias)[:rows]


def size_of(number: int, per_doubling: int) -> int:
    """The least that is no less, of so many sizes between a power of two and the next."""
    step = max(1, (1 << max(1, number).bit_length() - 1) // per_doubling)
    return -(-number // step) * step


def use(model: nn.Module, packs: Packs | None = None) -> None:
    """Let the linear modules of a model in float32 on a CPU compute so, where transformers' code runs it."""
    for module in model.modules():
        # Subclasses have code of their own.
        if type(module) is nn.Linear and _is_onednns(module.weight):
            module.forward = partial(_forward, module, packs)  # type: ignore[method-assign]


def logits(head: nn.Linear, x: Tensor, packs: Packs | None = None) -> Tensor:
    """What an output layer answers, in float32."""
    x = x.to(head.weight.dtype)  # of a few models a norm or the head stays wide
    return _wide_forward(head, x) if x.dtype in NARROW else linear(x, head.weight, head.bias, packs)


def widen_logits(model: Any) -> None:
    """Let the output layer of a model in a narrow dtype sum and answer in float32."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.dtype in NARROW:
        head.forward = MethodType(_wide_forward, head)  # type: ignore[method-assign]


def _is_onednns(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _forward(module: nn.Linear, packs: Packs | None, x: Tensor) -> Tensor:
    found = linear(x.reshape(-1, x.shape[-1]), module.weight, module.bias, packs)
    return found.view(*x.shape[:-1], module.out_features)


def _wide_forward(module: nn.Linear, x: Tensor) -> Tensor:
    rows, weight = x.reshape(-1, x.shape[-1]), module.weight
    if x.is_cuda:
        found = torch.mm(rows, weight.t(), out_dtype=torch.float32)  # no copy of the matrix
    else:
        # Part by part: the whole of it in float32 would be memory that is new to every step.
        parts = torch.split(weight, max(1, PART_ELEMENTS // weight.shape[1]))
        found = torch.cat([linear(rows.float(), part.float()) for part in parts], -1)
    if module.bias is not None:
        found += module.bias
    return found.view(*x.shape[:-1], module.out_features)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return F.linear(x, weight, bias)
    bias = None if bias is None else bias.contiguous()  # its strides are not read
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found
