"""Files as they are read, compressed or not: gzip, zstandard, xz and bzip2, known by how they begin.

1. What is read is what was compressed, whole: a file that ends early fails, it does not just end.
2. Nothing is read that nobody asks for, and some MiB at most are in memory, however small they were packed.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from typing import IO, Any, Final

import zstandard

#: How they begin.
GZIP, ZSTANDARD, XZ, BZIP2 = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh"
#: Of zstandard's frames that say nothing of the contents, behind a byte from 0x50 to 0x5f.
SKIPPABLE = b"\x2a\x4d\x18"
#: What reading raises of a file that is broken, besides OSError.
BROKEN: Final = (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
BLOCK_BYTES = 1 << 17
#: Four bytes may stand for 128 KiB, and what they stand for is in memory at once.
FEED_BYTES = 1 << 8


def unpacked(raw: IO[bytes]) -> IO[bytes]:
    """A file from its beginning. Reading raises OSError, and BROKEN."""
    beginning = raw.read(len(XZ))
    raw.seek(0)
    if beginning.startswith(GZIP):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if beginning.startswith(XZ):
        return lzma.LZMAFile(raw)
    if beginning.startswith(BZIP2):
        return bz2.BZ2File(raw)
    if beginning.startswith(ZSTANDARD) or beginning[1:4] == SKIPPABLE:
        return io.BufferedReader(_Zstandard(raw), BLOCK_BYTES)
    return raw


class _Zstandard(io.RawIOBase):
    """Frames, one behind the other. The library's own reader takes a frame that was cut for a whole one."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: Any = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As of any raw file."""
        while not self._ready:
            self._packed = self._packed or self._raw.read(FEED_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready, self._packed = memoryview(self._frame.decompress(self._packed)), b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)] = taken
        self._ready = self._ready[len(taken) :]
        return len(taken)
