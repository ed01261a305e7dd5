"""Which tensors a version must consist of: the names and shapes of the served model, and numbers it can hold.

1. Names are those of the Hugging Face model's `named_parameters()`: a tied parameter once, under its first
   name; nothing is fused.
2. A version is accepted only if it is exactly that: an engine may leave out or half-load a tensor silently.
3. Floats of another precision fit: the engine casts them, to a wider type exactly, to a narrower one rounding
   to nearest, as the trainer would have. So a trainer on a GPU can feed an engine on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor

#: How many differences an error names.
NAMED_DIFFERENCES = 3

FLOATS = frozenset({"F32", "BF16", "F16"})

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
        if not fits(tensor, dtype, shape):
            raise _refused(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, the model has {dtype} {list(shape)}",
                name,
            )


def fits(tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor can stand where the model has this dtype and shape."""
    return tensor.shape == shape and (tensor.dtype == dtype or {tensor.dtype, dtype} <= FLOATS)


def _refused(message: str, tensor: str) -> QuartetError:
    return QuartetError(
        "INVALID_REQUEST",
        f"{message}; serve the folder that the run was created from",
        field="tensors",
        value=tensor,
        remedy="serve the folder that the run was created from",
    )
