"""SPARSE: a tensor as the values that differ from its base, and by how many steps of its type they differ.

A blob is one segment after the other, each of SEGMENT_VALUES values (the last has the rest):

    u8 form | u32 listed | u32 escaped | streams

- Form UNCHANGED: nothing follows the form. GAPS: only changed values are listed; the first stream has the
  number of unchanged values before each, as bytes, where 255 means "255 more, and no change yet". EVERY: all
  values are listed, and there is no stream of gaps.
- Stream of codes: two bits for each listed value, four in a byte, lowest first: the zigzag of the difference
  (0 none, 1 one step down, 2 one up), or 3: escaped.
- Streams of escapes: one for each byte of the element, lowest first: that byte of the zigzag of every escaped
  value.
- A stream is u32 size, with the highest bit set if zstd follows, and the bytes.

1. Lossless for every dtype: floats are compared as integers in the order of their values, so that one step is
   the next representable number, and all arithmetic wraps.
2. The bytes are a function of base and tensor (and of the zstd library): equal requests get equal bytes.
3. Memory beside input and output is bounded by a segment, whatever the tensor's size.
4. `decode` trusts nothing: ValueError for bytes that are not a blob of that size, before anything is written
   outside of `out`, and never an allocation that the tensor's own size does not justify.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from quartet.weights.tensor import DTYPE_BYTES

#: Values of one segment: some 2 MiB of bfloat16, with scratch memory of a few times that.
SEGMENT_VALUES = 1 << 20
#: Values handled at once inside a segment: few enough for a core's cache, enough to be worth numpy's calls; a
#: multiple of four, whose codes share a byte.
BLOCK_VALUES = 1 << 17
#: Share of changed values above which listing all is smaller than gaps, and faster.
EVERY_ABOVE = 0.12
#: Higher levels gain less than 2 % of the bytes here and halve the speed.
ZSTD_LEVEL = 1

#: A stream whose first bytes do not shrink is noise all through: no time is spent on it.
PROBE_BYTES = 1 << 14

UNCHANGED, GAPS, EVERY = range(3)
GAP_MORE = 255

_HEAD = struct.Struct("<BII")
_SIZE = struct.Struct("<I")
_COMPRESSED = 1 << 31
#: Element size and sign-magnitude order of the dtypes that are floats; the rest are integers.
_FLOATS = {"F64", "F32", "F16", "BF16", "C64", "F8_E4M3", "F8_E5M2"}
#: Stands for an escape among the steps, of which there are no others than 0, -1 and 1.
_ESCAPED_STEP = 2
#: The four codes of every byte, and the steps that they stand for.
_CODES = (np.arange(256, dtype=np.uint8)[:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
_STEPS = np.array([0, -1, 1, _ESCAPED_STEP], np.int8)[_CODES]
#: Moves the lowest two bits of each byte of a word to their place in the highest byte; nothing carries.
_GATHER = np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)

Ints = NDArray[Any]
Bytes = NDArray[np.uint8]


class _Elements:
    """How the values of a dtype are counted."""

    def __init__(self, dtype: str) -> None:
        # A complex value is two floats.
        self.width = 4 if dtype == "C64" else DTYPE_BYTES[dtype]
        self.signed = np.dtype(f"<i{self.width}")
        self.unsigned = np.dtype(f"<u{self.width}")
        self.is_float = dtype in _FLOATS
        self._sign_shift = self.signed.type(8 * self.width - 1)
        self._magnitude = self.signed.type(np.iinfo(self.signed).max)
        self._steps_of_byte = _STEPS.astype(self.signed)

    def values(self, data: memoryview | bytes) -> Ints:
        return np.frombuffer(data, self.signed)

    def ordered(self, values: Ints) -> Ints:
        """Floats as integers in the order of the numbers; its own inverse."""
        if not self.is_float:
            return values
        ordered = values >> self._sign_shift
        ordered &= self._magnitude
        ordered ^= values
        return np.asarray(ordered)

    def coded(self, base: Ints, new: Ints) -> tuple[Bytes, Ints]:
        """The codes of how far each value moved, four in a byte, and the zigzags of the escaped ones."""
        # In place, and by comparisons: numpy's minimum of small integers is ten times as slow as they are.
        steps = self.ordered(new) - self.ordered(base)
        unsigned = steps.view(self.unsigned)
        codes_low = (unsigned > 1).view(np.uint8)  # of one down and of escaped
        unsigned += self.unsigned.type(1)
        codes = (unsigned > 1).view(np.uint8)  # of one up and of escaped
        codes += codes
        codes |= codes_low
        escaped = steps.take(np.flatnonzero(unsigned > 2)) - self.signed.type(1)
        return _pack(codes), self.zigzag(escaped)

    def zigzag(self, steps: Ints) -> Ints:
        return np.asarray((steps << self.signed.type(1)) ^ (steps >> self._sign_shift)).view(self.unsigned)

    def unzigzag(self, zigzag: Ints) -> Ints:
        one = self.unsigned.type(1)
        return np.asarray((zigzag >> one) ^ (~(zigzag & one) + one)).view(self.signed)

    def steps(self, codes: Bytes, count: int, escaped: Ints) -> tuple[Ints, int]:
        """How far each of `count` values moves, and how many of the escaped ones are among them."""
        steps: Ints = self._steps_of_byte.take(codes, axis=0).reshape(-1)[:count]
        places = np.flatnonzero(steps == _ESCAPED_STEP)
        # A ValueError where fewer are left than are marked.
        steps[places] = escaped[: len(places)]
        return steps, len(places)

    def moved(self, base: Ints, steps: Ints) -> Ints:
        """The values that lie so far from the base."""
        return self.ordered(self.ordered(base) + steps)


def encode(base: memoryview | bytes, new: memoryview | bytes, dtype: str) -> list[bytes]:
    """The blob that leads from one tensor to another of the same size, in parts."""
    elements = _Elements(dtype)
    old_values, new_values = elements.values(base), elements.values(new)
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    parts: list[bytes] = []
    for at in range(0, len(new_values), SEGMENT_VALUES):
        old, new_ones = old_values[at : at + SEGMENT_VALUES], new_values[at : at + SEGMENT_VALUES]
        parts += _encode_segment(elements, compressor, old, new_ones)
    return parts


def _encode_segment(
    elements: _Elements, compressor: zstandard.ZstdCompressor, base: Ints, new: Ints
) -> list[bytes]:
    positions = _few_positions(base, new)
    if positions is None:
        form, listed, streams = EVERY, len(new), []
        pairs = [(base[at:end], new[at:end]) for at, end in _blocks(len(new))]
    elif not len(positions):
        return [bytes([UNCHANGED])]
    else:
        form, listed, streams = GAPS, len(positions), [_gaps(positions)]
        pairs = [(base[positions], new[positions])]
    codes, escapes = zip(*(elements.coded(*block) for block in pairs), strict=True)
    escaped = np.concatenate(escapes)
    streams.append(np.concatenate(codes))
    streams += [np.ascontiguousarray(plane) for plane in escaped.view(np.uint8).reshape(-1, elements.width).T]
    return [
        _HEAD.pack(form, listed, len(escaped)),
        *(part for one in streams for part in _stream(compressor, one)),
    ]


def _few_positions(base: Ints, new: Ints) -> NDArray[np.int64] | None:
    """Where the values differ; None where so many do that all are to be listed."""
    # What the first block says spares a pass over the segment; wrong, it costs little: zstd likes zeros.
    for until in (BLOCK_VALUES, len(new)):
        changed = base[:until] != new[:until]
        if np.count_nonzero(changed) > EVERY_ABOVE * len(changed):
            return None
    return np.flatnonzero(changed)


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    return ((at, min(count, at + BLOCK_VALUES)) for at in range(0, count, BLOCK_VALUES))


def _gaps(positions: NDArray[np.int64]) -> Bytes:
    gaps = np.diff(positions, prepend=-1).astype(np.uint32) - np.uint32(1)
    more = gaps // np.uint32(GAP_MORE)
    rest = gaps - more * np.uint32(GAP_MORE)
    ends = np.cumsum(more, dtype=np.int64) + np.arange(len(more))
    stream = np.full(int(ends[-1]) + 1, GAP_MORE, np.uint8)
    stream[ends] = rest
    return stream


def _pack(codes: Bytes) -> Bytes:
    padded = np.pad(codes, (0, -len(codes) % 4)).view("<u4") if len(codes) % 4 else codes.view("<u4")
    # The four bytes of a word hold two bits each: bring them together in the highest byte.
    words = padded * _GATHER
    words >>= np.uint32(24)
    return words.astype(np.uint8)


def _stream(compressor: zstandard.ZstdCompressor, data: Bytes) -> Iterator[bytes]:
    packed = _packed(compressor, data)
    if packed is None:
        yield _SIZE.pack(len(data))
        yield data.tobytes()
    else:
        yield _SIZE.pack(len(packed) | _COMPRESSED)
        yield packed


def _packed(compressor: zstandard.ZstdCompressor, data: Bytes) -> bytes | None:
    """The stream compressed; None where that does not make it smaller."""
    if not len(data):
        return None
    probe = compressor.compress(data[:PROBE_BYTES].data)
    if len(probe) >= min(len(data), PROBE_BYTES):
        return None
    if len(data) <= PROBE_BYTES:
        return probe
    packed = compressor.compress(data.data)
    return packed if len(packed) < len(data) else None


def decode(blob: memoryview, base: memoryview | bytes, dtype: str, out: memoryview) -> None:
    """Write the tensor that the blob leads to into `out`. ValueError says what is wrong with the blob."""
    elements = _Elements(dtype)
    reader = _Reader(blob)
    old_values = elements.values(base)
    new_values = np.frombuffer(out, elements.signed)
    try:
        for at in range(0, len(old_values), SEGMENT_VALUES):
            old, new = old_values[at : at + SEGMENT_VALUES], new_values[at : at + SEGMENT_VALUES]
            _decode_segment(reader, elements, old, new)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    reader.finish()


def _decode_segment(reader: _Reader, elements: _Elements, base: Ints, new: Ints) -> None:
    form = reader.take(1)[0]
    if form == UNCHANGED:
        new[:] = base
        return
    listed, escaped = struct.unpack("<II", reader.take(_HEAD.size - 1))
    if form not in (GAPS, EVERY) or not escaped <= listed <= len(base) or not listed:
        raise ValueError(f"form {form} with {listed} values, {escaped} of them escaped, of {len(base)}")
    positions = None
    if form == GAPS:
        positions = _positions(reader.stream(None, listed + len(base) // GAP_MORE), listed, len(base))
    elif listed != len(base):
        raise ValueError(f"{listed} of {len(base)} values where all are listed")
    codes = reader.stream(-(-listed // 4), None)
    escapes = np.empty((escaped, elements.width), np.uint8)
    for plane in range(elements.width):
        escapes[:, plane] = reader.stream(escaped, None)
    steps_escaped = elements.unzigzag(escapes.reshape(-1).view(elements.unsigned))
    if positions is None:
        used = _move_every(elements, base, new, codes, steps_escaped)
    else:
        new[:] = base
        steps, used = elements.steps(codes, listed, steps_escaped)
        new[positions] = elements.moved(base[positions], steps)
    if used != escaped:
        raise ValueError(f"{escaped} escapes where {used} are marked")


def _positions(stream: Bytes, listed: int, size: int) -> NDArray[np.int64]:
    ends = stream != GAP_MORE
    reached = np.cumsum(stream.astype(np.int64) + ends)
    if np.count_nonzero(ends) != listed or not ends[-1] or reached[-1] > size:
        raise ValueError(f"gaps that do not lead to {listed} of {size} values")
    return np.asarray(reached[ends] - 1)


def _move_every(elements: _Elements, base: Ints, new: Ints, codes: Bytes, escaped: Ints) -> int:
    used = 0
    for at, end in _blocks(len(base)):
        steps, more = elements.steps(codes[at // 4 : -(-end // 4)], end - at, escaped[used:])
        new[at:end] = elements.moved(base[at:end], steps)
        used += more
    return used


class _Reader:
    """Takes the parts of a blob in order."""

    def __init__(self, blob: memoryview) -> None:
        self._blob, self._at = blob, 0
        self._decompressor = zstandard.ZstdDecompressor()

    def take(self, size: int) -> memoryview:
        part = self._blob[self._at : self._at + size]
        if len(part) < size:
            raise ValueError(f"a blob of {len(self._blob)} bytes ends within a part")
        self._at += size
        return part

    def stream(self, size: int | None, most: int | None) -> Bytes:
        """The next stream: of exactly `size` bytes, or, where that is not known, of at most `most`."""
        (stored,) = _SIZE.unpack(self.take(_SIZE.size))
        data = self.take(stored & ~_COMPRESSED)
        length = zstandard.frame_content_size(data) if stored & _COMPRESSED else len(data)
        if length != size and (size is not None or most is None or not 0 < length <= most):
            raise ValueError(f"a stream of {length} bytes where {size or most} are due")
        if stored & _COMPRESSED:
            return np.frombuffer(self._decompressor.decompress(data), np.uint8)
        return np.frombuffer(data, np.uint8)

    def finish(self) -> None:
        if self._at != len(self._blob):
            raise ValueError(f"{len(self._blob) - self._at} bytes follow the last segment")
