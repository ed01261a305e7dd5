"""Which tensors a version must consist of: the names, dtypes and shapes of the served model.

1. Names are those of the Hugging Face model's `named_parameters()`: a tied parameter once, under its first
   name; nothing is fused.
2. A version is accepted only if it is exactly that: an engine may leave out or half-load a tensor silently.
"""

from __future__ import annotations

from collections.abc import Mapping

from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor

#: How many differences an error names.
NAMED_DIFFERENCES = 3

#: Dtype (as safetensors calls it) and shape of each tensor.
Layout = Mapping[str, tuple[str, tuple[int, ...]]]


def check_layout(tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Refuse a version that is not of this layout. Errors: INVALID_REQUEST."""
    missing = sorted(layout.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - layout.keys())
    if missing or unknown:
        raise _refused(
            f"the version lacks {len(missing)} tensors of the model "
            f"({', '.join(missing[:NAMED_DIFFERENCES])}) "
            f"and has {len(unknown)} unknown ones ({', '.join(unknown[:NAMED_DIFFERENCES])})",
            (missing + unknown)[0],
        )
    for name, (dtype, shape) in layout.items():
        tensor = tensors[name]
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise _refused(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, the model has {dtype} {list(shape)}",
                name,
            )


def _refused(message: str, tensor: str) -> QuartetError:
    return QuartetError(
        "INVALID_REQUEST",
        f"{message}; serve the folder that the run was created from",
        field="tensors",
        value=tensor,
        remedy="serve the folder that the run was created from",
    )
