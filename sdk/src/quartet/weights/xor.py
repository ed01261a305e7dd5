"""XOR_ZSTD: zstd of a tensor's bytes XORed with those of its base, one frame.

1. Lossless for every dtype and every content.
2. Memory beside input and output is bounded by a block.
3. `decode` trusts nothing: ValueError for bytes that are not a frame of exactly the tensor's size.
"""

from __future__ import annotations

import numpy as np
import zstandard

#: Bytes handled at once: what lies in a core's cache.
BLOCK_BYTES = 1 << 18
#: The fastest level that still compresses the bytes' own distribution.
ZSTD_LEVEL = 1


def encode(base: memoryview | bytes, new: memoryview | bytes) -> list[bytes]:
    """The frame that leads from one tensor to another of the same size, in parts."""
    old_bytes, new_bytes = np.frombuffer(base, np.uint8), np.frombuffer(new, np.uint8)
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj(size=len(new_bytes))
    parts = []
    for at in range(0, len(new_bytes), BLOCK_BYTES):
        differing = old_bytes[at : at + BLOCK_BYTES] ^ new_bytes[at : at + BLOCK_BYTES]
        parts.append(frame.compress(differing.data))
    return [*filter(None, parts), frame.flush()]


def decode(blob: memoryview, base: memoryview | bytes, out: memoryview) -> None:
    """Write the tensor that the frame leads to into `out`. ValueError says what is wrong with the frame."""
    old_bytes, new_bytes = np.frombuffer(base, np.uint8), np.frombuffer(out, np.uint8)
    try:
        with zstandard.ZstdDecompressor().stream_reader(blob, read_across_frames=True) as reader:
            for at in range(0, len(new_bytes), BLOCK_BYTES):
                block = new_bytes[at : at + BLOCK_BYTES]
                if _fill(reader, block.data) != len(block):
                    raise ValueError(f"a frame that is shorter than {len(new_bytes)} bytes")
                block ^= old_bytes[at : at + BLOCK_BYTES]
            if reader.read(1):
                raise ValueError(f"a frame that is longer than {len(new_bytes)} bytes")
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def _fill(reader: zstandard.ZstdDecompressionReader, block: memoryview) -> int:
    filled = 0
    while filled < len(block):
        count = reader.readinto(block[filled:])
        if not count:
            break
        filled += count
    return filled
