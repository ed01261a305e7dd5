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
            given = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        sizes = [one.nbytes for one in given.values()]
        # The copying alone holds the file, and not this object: in no cycle, what is dropped goes at once.
        self._pieces: Iterator[bool] | None = None
        if has_room(device, sum(sizes), max(sizes, default=0)):
            self._pieces = _copies(given, self.tensors, device)

    def more(self) -> bool:
        """Copy one more piece; False: nothing more will be copied."""
        pieces, self._pieces = self._pieces, None  # which it stays where a copy fails
        if pieces is None:
            return False
        if next(pieces, False):
            self._pieces = pieces
            return True
        self.complete = True
        return False


def _copies(given: dict[str, Tensor], made: dict[str, Tensor], device: torch.device) -> Iterator[bool]:
    taken = 0
    for name, one in given.items():
        copy = torch.empty_like(one, device=device)
        size = PIECE_BYTES // one.itemsize
        for target, part in zip(*(torch.split(each.view(-1), size) for each in (copy, one)), strict=True):
            target.copy_(part)
            taken += part.nbytes
            if taken >= PIECE_BYTES:
                yield True
                taken = 0
        made[name] = copy


def has_room(device: torch.device, nbytes: int, largest: int) -> bool:
    """Whether a device takes a version of this size."""
    if device.type == "cpu":
        return nbytes <= SMALL_BYTES
    if device.type != "cuda":
        return False
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free - nbytes >= SPARE_BYTES + SPARE_OF_LARGEST * largest
