"""Products of rows with matrices, in float32 on a CPU by oneDNN, and their gradients.

1. `linear` is torch.nn.functional.linear to float32 rounding, and its gradients. From two rows and two
   outputs on, the bits of a row do not depend on how many there are (docs/numerics.md).
2. On other devices, in other dtypes and under autocast it is PyTorch's own.
3. `wide_linear` rounds no sum to a dtype narrower than float32.
4. `use` changes how the linear modules of a model compute, not what they are: their type, their parameters
   and the names of these stay.
5. On processors of Intel's and on those without AVX-512 gradients, whose bits no engine has to meet, are
   PyTorch's own.

PyTorch takes MKL for these, whose kernels for processors that are not Intel's have AVX2 at most, half the
speed of AVX-512. On one of Intel's it takes six tenths of oneDNN's time for the gradient of a weight, and
nine for that of an input; on one of AMD's with AVX2 (Zen 3) six tenths, and as long.

Shapes: N rows (any number of dimensions before the last), I inputs, O outputs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

#: 16 MiB of float32.
PART_ELEMENTS = 1 << 22
#: What Linux says of the processors.
CPU_INFO = Path("/proc/cpuinfo")


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """The product x @ weight.T + bias: [N, O]."""
    if not _is_for_onednn(x_NI, weight_OI):
        return F.linear(x_NI, weight_OI, bias_O)
    if not torch.is_grad_enabled():
        return _product(x_NI, weight_OI, bias_O)
    # A view of what the function gives, and not what it gives: models may change it in place.
    return _Linear.apply(x_NI, weight_OI, bias_O).view(*x_NI.shape[:-1], -1)  # type: ignore[no-any-return,no-untyped-call]


def wide_linear(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """The product in float32, whatever the dtype of both: [N, O], without a gradient."""
    if x_NI.dtype == torch.float32:
        return linear(x_NI, weight_OI)
    if x_NI.is_cuda:
        return torch.mm(x_NI, weight_OI.t(), out_dtype=torch.float32)  # no copy of the matrix
    # Part by part: the whole of it in float32 would be memory that is new every time.
    parts = torch.split(weight_OI, max(1, PART_ELEMENTS // weight_OI.shape[1]))
    return torch.cat([linear(x_NI.float(), part.float()) for part in parts], -1)


def add_weight_gradient(d_weight_OI: Tensor, d_NO: Tensor, x_NI: Tensor) -> None:
    """d_weight += d.T @ x, in place; it may be wider than they are."""
    if _is_mkls() or not _is_for_onednn(x_NI, d_NO):
        if d_NO.dtype == d_weight_OI.dtype:
            d_weight_OI.addmm_(d_NO.t(), x_NI)
        else:
            d_weight_OI += d_NO.t() @ x_NI
        return
    # oneDNN's sum begins at zero: what it gives is added part by part, never held beside the whole.
    outputs = max(1, PART_ELEMENTS // d_weight_OI.shape[1])
    for d_weight, d in zip(torch.split(d_weight_OI, outputs), torch.split(d_NO.t(), outputs), strict=True):
        d_weight += _product(d, x_NI.t())


def use(model: nn.Module) -> None:
    """Let the linear modules of a model compute so; also those that were added since."""
    for module in model.modules():
        # Subclasses have code of their own.
        if type(module) is nn.Linear:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x_NI: Tensor) -> Tensor:
    return linear(x_NI, module.weight, module.bias)


class _Linear(torch.autograd.Function):
    """[all rows, O]."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        # No more than the gradients take: a frozen layer keeps no inputs.
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x_NI if needs_weight else None, weight_OI if needs_x else None)
        ctx.shape = x_NI.shape
        return _product(x_NI.reshape(-1, x_NI.shape[-1]), weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        d_nO = gradients[0].contiguous()  # an expanded one has strides of zero
        product = F.linear if _is_mkls() else _product
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = product(d_nO, weight_OI.t()).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            d_weight = product(d_nO.t(), x_NI.reshape(-1, x_NI.shape[-1]).t())
        if ctx.needs_input_grad[2]:
            d_bias = d_nO.sum(0)
        return d_x, d_weight, d_bias


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        # Not those that are spread over ranks.
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
        and x.numel() > 0
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    )


def _product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    bias_O = None if bias_O is None else bias_O.contiguous()  # its strides are not read
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
    return found


@cache
def _is_mkls() -> bool:
    """Whether MKL has kernels for all that this processor can."""
    if not torch.backends.mkl.is_available() or not CPU_INFO.exists():  # type: ignore[no-untyped-call]
        return False
    described = CPU_INFO.read_text()
    return "GenuineIntel" in described or "avx512f" not in described
