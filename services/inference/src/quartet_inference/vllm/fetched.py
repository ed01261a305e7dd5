"""A staged version on its way to a worker's device, piece by piece between decode steps.

While a load lasts nothing is sampled, so it reads what is there and not the file.

1. What was fetched has the bits, types and shapes of the file.
2. A piece is less than twice PIECE_BYTES, whatever the tensors' sizes.
3. A version is fetched only where there is room for it beside what steps and a load take.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from safetensors import safe_open
from torch import Tensor

#: On a GPU some ten milliseconds of copying from memory that is not pinned.
PIECE_BYTES = 32 << 20
#: What steps and a load may still take of a GPU; the load makes each tensor anew.
SPARE_BYTES, SPARE_OF_LARGEST = 2 << 30, 2
#: A version that a CPU's memory takes once more, whatever else is there.
SMALL_BYTES = 256 << 20


class Fetched:
    """One version, or what is there of it."""

    def __init__(self, path: str, device: torch.device) -> None:
        """Errors: those of safetensors."""
        self.path = path
        self.tensors = dict[str, Tensor]()
        self.complete = False
        with safe_open(path, "pt") as file:
            # Mapped, not read.
            self._given = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        sizes = [one.nbytes for one in self._given.values()]
        self._pieces = (
            self._copies(device) if has_room(device, sum(sizes), max(sizes, default=0)) else iter(())
        )

    def more(self) -> bool:
        """Copy one more piece; False: nothing more will be copied."""
        return next(self._pieces, False)

    def _copies(self, device: torch.device) -> Iterator[bool]:
        taken = 0
        for name, given in self._given.items():
            made = torch.empty_like(given, device=device)
            size = PIECE_BYTES // given.itemsize
            for target, part in zip(*(torch.split(one.view(-1), size) for one in (made, given)), strict=True):
                target.copy_(part)
                taken += part.nbytes
                if taken >= PIECE_BYTES:
                    yield True
                    taken = 0
            self.tensors[name] = made
        self._given.clear()  # else the file would be there for as long as this
        self.complete = True


def has_room(device: torch.device, nbytes: int, largest: int) -> bool:
    """Whether a device takes a version of this size."""
    if device.type == "cpu":
        return nbytes <= SMALL_BYTES
    if device.type != "cuda":
        return False
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free - nbytes >= SPARE_BYTES + SPARE_OF_LARGEST * largest
