"""Samples that were read, each of which may be taken again: many more than memory holds.

1. What is put there comes back as it was, in the order in which it was put there.
2. Memory holds 16 bytes of each, and MEMORY_BYTES of all of them together. More go to a file in the folder
   for temporary files (TMPDIR), which has no name and goes with the process.
3. How many tokens each has is known without reading any.
4. What `blocks` gives is the shelf, once it is in a file (`Shelf.of`): there it stays, and memory holds the
   16 bytes alone. Nothing more is put there then.
"""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Self, overload

from quartet.v1.rollout_pb2 import Sample

#: Some ten thousand chats.
MEMORY_BYTES = 1 << 26


class Shelf(Sequence[Sample]):
    """The samples, in their order."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES, file: IO[bytes] | None = None) -> None:
        """`file`: where they are, in place of a temporary one; it goes with the shelf."""
        self._file: IO[bytes] = file or tempfile.SpooledTemporaryFile(max_size=memory_bytes)  # noqa: SIM115 - it goes with us
        self._begins = 0
        self._ends = array("Q", (0,))
        self._lengths = array("Q")
        weakref.finalize(self, _close, self._file)

    @classmethod
    def of(cls, file: IO[bytes], count: int) -> Self:
        """Of what `blocks` gave of so many samples, which stands from here on in a file. Raises OSError."""
        shelf = cls(file=file)
        for numbers in (shelf._ends, shelf._lengths):
            numbers.frombytes(file.read(numbers.itemsize * count))
        shelf._begins = file.tell()
        return shelf

    def blocks(self, most: int) -> Iterator[bytes]:
        """All that is there, as the file of a shelf has it, at most so many bytes of samples at once. Raises
        OSError."""
        yield self._ends[1:].tobytes()
        yield self._lengths.tobytes()
        for start in range(0, self.size_bytes, most):
            self._file.seek(self._begins + start)
            yield self._file.read(min(most, self.size_bytes - start))

    @property
    def size_bytes(self) -> int:
        """Of the samples, without what memory holds of each."""
        return self._ends[-1]

    def put(self, sample: Sample) -> None:
        """One more. Raises OSError, which names the folder that has no room for it."""
        try:
            self._file.seek(self._ends[-1])
            self._ends.append(self._ends[-1] + self._file.write(sample.SerializeToString()))
        except OSError as error:
            error.filename = f"{tempfile.gettempdir()} (TMPDIR)"
            raise
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

    def taken(self, numbers: Iterable[int]) -> list[Sample]:
        """Those of these numbers. Raises OSError."""
        return [self[number] for number in numbers]

    def _read(self, number: int) -> Sample:
        start = self._ends[number]
        self._file.seek(self._begins + start)
        return Sample.FromString(self._file.read(self._ends[number + 1] - start))


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # of what had no room, and is wanted no more
        file.close()
