"""The served weights: a copy of the masters in the served dtype, and the same memory as tensors of the weight
plane.

1. Names are those of the Hugging Face checkpoint; tied weights appear once.
2. The cast is round-to-nearest-even, the same that a checkpoint saved in that dtype would hold.
3. A snapshot shares no memory with the model: later steps cannot change it. Of a model that is spread over
   ranks each rank has its part; where it is published, tensor after tensor is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from quartet.weights.tensor import Tensor

from quartet_trainer.ranks.layout import at_first, on_host

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WIRE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}

Snapshot = Mapping[str, torch.Tensor]


def cast(masters: Iterable[tuple[str, torch.Tensor]], served_dtype: str) -> Snapshot:
    """Copy masters, cast, to the CPU."""
    dtype = TORCH_DTYPES[served_dtype]
    return {name: on_host(master, dtype) for name, master in masters}


def gathered(masters: Iterable[tuple[str, torch.Tensor]], served_dtype: str, keep: bool = True) -> Snapshot:
    """Cast masters on the CPU, whole; none for who does not keep them, but gives its part."""
    kept = {}
    for name, master in masters:
        tensor = at_first(on_host(master, TORCH_DTYPES[served_dtype]))
        if keep and tensor is not None:
            kept[name] = tensor
    return kept


def wire_tensors(weights: Snapshot, keep: bool = True) -> dict[str, Tensor]:
    """The snapshot as bytes, without copying where it is whole; empty for who does not keep it."""
    tensors = {}
    for name, tensor in weights.items():
        gathered = at_first(tensor)
        if keep and gathered is not None:
            # numpy knows no bfloat16; bytes are all that is needed.
            data = gathered.reshape(-1).view(torch.uint8).numpy().data
            tensors[name] = Tensor(_WIRE_NAMES[tensor.dtype], tuple(tensor.shape), data)
    return tensors
