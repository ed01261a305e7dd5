"""What a state of a run holds, and how its tensors are kept in files.

1. Tensors are safetensors. Nothing is pickled.
2. Ranks write their parts in files of their own; what one process wrote they read, as it reads what they
   wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

#: File stems: what is trained, what its optimizer keeps, and gradients that were not applied yet.
WEIGHTS, MOMENTS, GRADIENTS = "weights", "moments", "gradients"

#: Tensors by the file that they are in and their name.
Stems = Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Content:
    """What a state holds: JSON, and tensors by file stem and name."""

    meta: dict[str, Any]
    tensors: Stems
    #: Where it was read from.
    folder: Path | None = None


class TensorFiles(Protocol):
    """How the tensors of a state are kept."""

    def write(self, folder: Path, content: Content) -> None:
        """Write them. Errors: NOT_READY."""
        ...

    def read(self, folder: Path) -> Stems:
        """Read them again."""
        ...

    def digests(self, folder: Path, names: Sequence[str], progress: Callable[[], None]) -> Mapping[str, str]:
        """The xxh3_128 of each of these files of a state, which are there. Errors: OSError, NOT_READY."""
        ...


def write_stem(folder: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write whole tensors as one file. Errors: OSError, SafetensorError."""
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    save_file(plain, folder / f"{stem}.safetensors")
