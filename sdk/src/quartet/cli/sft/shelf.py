"""Samples that were read, each of which may be taken again: many more than memory holds.

1. What is put there comes back as it was, in the order in which it was put there.
2. Memory holds 16 bytes of each, and MEMORY_BYTES of all of them together. More go to a file in the folder
   for temporary files (TMPDIR), which has no name and goes with the process.
3. How many tokens each has is known without reading any.
"""

from __future__ import annotations

import tempfile
import weakref
from array import array
from collections.abc import Sequence
from typing import overload

from quartet.v1.rollout_pb2 import Sample

#: Some ten thousand chats.
MEMORY_BYTES = 1 << 26


class Shelf(Sequence[Sample]):
    """The samples, in their order."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=memory_bytes)  # noqa: SIM115 - as long as we live
        self._ends = array("Q", (0,))
        self._lengths = array("Q")
        weakref.finalize(self, self._file.close)

    def put(self, sample: Sample) -> None:
        """One more. Raises OSError."""
        self._file.seek(self._ends[-1])
        self._ends.append(self._ends[-1] + self._file.write(sample.SerializeToString()))
        self._lengths.append(len(sample.token_ids))

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        """As of any sequence; those of a slice are read at once. Raises OSError."""
        if isinstance(index, slice):
            return [self._read(number) for number in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(index)
        return self._read(number)

    def _read(self, number: int) -> Sample:
        start = self._ends[number]
        self._file.seek(start)
        return Sample.FromString(self._file.read(self._ends[number + 1] - start))
