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
from quartet.v1 import weights_pb2 as pb
from quartet.weights.tensor import Tensor

#: How many differences an error names.
NAMED_DIFFERENCES = 3

FLOATS = frozenset({"F32", "BF16", "F16"})

REMEDY = "serve the folder that the trained model came from, and publish its parameters by their names there"

#: Dtype (as safetensors calls it) and shape of a tensor.
Kind = tuple[str, tuple[int, ...]]
Layout = Mapping[str, Kind]


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """What these tensors are."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def declared_layout(manifest: pb.WeightManifest) -> Layout:
    """What a manifest says that its tensors are."""
    return {info.name: (info.dtype, tuple(info.shape)) for info in manifest.tensors}


def check_layout(given: Layout, layout: Layout) -> None:
    """Refuse a version that is not of this layout. Errors: INVALID_REQUEST."""
    missing = sorted(layout.keys() - given.keys())
    unknown = sorted(given.keys() - layout.keys())
    if missing or unknown:
        differences = [
            f"{what} ({', '.join(names[:NAMED_DIFFERENCES])})"
            for what, names in (
                (f"lacks {len(missing)} tensors of the model", missing),
                (f"has {len(unknown)} unknown ones", unknown),
            )
            if names
        ]
        raise _refused(f"the version {' and '.join(differences)}", (missing + unknown)[0])
    for name, (dtype, shape) in layout.items():
        if not fits(given[name], (dtype, shape)):
            given_dtype, given_shape = given[name]
            raise _refused(
                f"tensor {name} is {given_dtype} {list(given_shape)}, the model has {dtype} {list(shape)}",
                name,
            )


def fits(given: Kind, wanted: Kind) -> bool:
    """Whether a tensor of one kind can stand where the model has the other."""
    return given[1] == wanted[1] and (given[0] == wanted[0] or {given[0], wanted[0]} <= FLOATS)


def _refused(message: str, tensor: str) -> QuartetError:
    return QuartetError(
        "INVALID_REQUEST", f"{message}; {REMEDY}", field="tensors", value=tensor, remedy=REMEDY
    )
