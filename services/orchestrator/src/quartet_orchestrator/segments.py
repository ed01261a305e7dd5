"""Segments: append-only files of checksummed frames. What survives a crash is a prefix of what was appended.

Frame: length (u32 LE) | xxh3-64 of length and payload (u64 LE) | payload.

1. `append` returns after the frame was handed to the operating system: it survives SIGKILL. It survives a
   power cut after `syncer()()`. Of one that failed, or was taken back, nothing stays: where the disk refuses
   to cut it off, it is made a torn tail, as far as the disk takes anything, and nothing else is appended
   before it is cut off.
2. On opening, the last segment is read whole. A bad frame with no whole one behind it is a torn tail: it is
   cut off and the bytes are counted.
3. A bad frame with whole ones behind it is `JournalCorrupt`, and so is one in an older segment (synced before
   its successor exists) or in anything read later: never skipped, and nothing is changed.
4. A segment is closed when it reaches SEGMENT_BYTES, a frame holds at most MAX_PAYLOAD_BYTES.
5. A sealed segment can be replaced as a whole: `rewrite` prepares the new file (synced), `replace` renames
   it. Files that were prepared and not renamed are removed on opening.
6. A segment is readable by its owner alone: a run's configuration is in it, and in that a judge's key may be.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash
from quartet.kit.folder import flush, remedy_of

# Reading one segment whole on opening takes well under a second; a long run has tens of files, not thousands.
SEGMENT_BYTES = 64 << 20
# A rollout arrives in one 4 MiB message; the record around it is small.
MAX_PAYLOAD_BYTES = 8 << 20

# Segments that are held open for reading: a follower at the beginning, one at the end, a replay between.
MAX_READING = 4
# The end of the name of a file that is to replace a segment.
REWRITTEN = ".rewritten"

_HEAD = struct.Struct("<IQ")
HEAD_BYTES = _HEAD.size
# How every payload begins, a JournalRecord: field 1 (its number, a varint), then the tag of field 2. Only a
# hint where to look for a whole frame; the frame's checksum decides.
_PAYLOAD_START = re.compile(rb"\x08(?=[\x80-\xff]{0,9}[\x00-\x7f]\x10)")


class JournalCorrupt(Exception):
    """The files do not hold what was written. The disk lied; nothing was changed."""


@dataclass(frozen=True)
class Frame:
    """Where a payload lies."""

    segment: int
    offset: int
    length: int


def end_of(frame: Frame) -> int:
    """The byte of its segment at which the next frame begins."""
    return frame.offset + _HEAD.size + frame.length


class Segments:
    """The segments in one folder, opened by making it. Raises JournalCorrupt or OSError."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        folder.mkdir(parents=True, exist_ok=True)
        # A pattern of pathlib's finds nothing in a folder that cannot be listed: a full one would look empty.
        found = os.listdir(folder)
        names = [name.removesuffix(".seg") for name in found if name.endswith(".seg")]
        strange = sorted(name for name in names if not name.isdecimal())
        if strange:
            raise JournalCorrupt(f"{folder} has {strange[0]}.seg, which is no segment; move it elsewhere")
        numbers = sorted(map(int, names))
        if numbers != list(range(1, len(numbers) + 1)):
            raise JournalCorrupt(f"{folder} has segments {numbers}; one is missing")
        for name in found:
            if name.endswith(REWRITTEN):
                (folder / name).unlink()
        # Descriptors of segments that were read, the one that was opened first first.
        self._reading: dict[int, int] = {}
        # Of the segments so far. To put one together costs more than the read that it is for.
        self._paths: dict[int, Path] = {}
        self.torn_bytes = 0
        # Whether there is something behind the end, which the disk did not cut off.
        self._cut_is_owed = False
        self._last = numbers[-1] if numbers else 0
        if self._last:
            self._end = self._cut_torn_tail()
            self._file = os.open(self._path(self._last), os.O_WRONLY | os.O_APPEND)
        else:
            self._start_segment()

    def append(self, payload: bytes) -> Frame:
        """Where the payload lies from now on. Raises OSError; then it lies nowhere."""
        assert 0 < len(payload) <= MAX_PAYLOAD_BYTES, len(payload)
        if self._cut_is_owed:
            self._cut()
        if self._end >= self._segment_bytes:
            full = self._file
            with named(self._path(self._last), "synced"):
                os.fsync(full)
            self._start_segment()
            os.close(full)
        frame = Frame(self._last, self._end, len(payload))
        data = _encode(payload)
        with named(self._path(self._last), "written"):
            written = os.write(self._file, data)
        if written != len(data):
            # A full disk. What was written is a torn tail; take it back so that the next frame is whole.
            with suppress(OSError):
                self._cut()
            raise OSError(
                f"{self._path(self._last)} cannot be written: it took {written} of {len(data)} bytes; "
                f"{remedy_of(errno.ENOSPC)}"
            )
        self._end += len(data)
        return frame

    def take_back(self, frame: Frame) -> None:
        """Undoes the last append, before the next one at the latest."""
        assert (frame.segment, end_of(frame)) == (self._last, self._end), frame
        self._end = frame.offset
        self._leave_nothing()

    def _leave_nothing(self) -> None:
        """Whoever opens it finds a torn tail at most behind the end, as far as the disk takes anything."""
        with suppress(OSError):
            self._cut()
        if self._cut_is_owed:
            with suppress(OSError):
                self._spoil()

    def _cut(self) -> None:
        """Cuts off what is behind the end. Raises OSError; then it is owed."""
        self._cut_is_owed = True
        with named(self._path(self._last), "cut to its whole records"):
            os.ftruncate(self._file, self._end)
        self._cut_is_owed = False

    def _spoil(self) -> None:
        """What is behind the end is no whole frame any more, for whoever opens it. Raises OSError."""
        # What is written with O_APPEND lies behind all there is, whatever the offset.
        file = os.open(self._path(self._last), os.O_WRONLY)
        try:
            os.pwrite(file, bytes(_HEAD.size), self._end)
            os.fsync(file)
        finally:
            os.close(file)

    def read(self, frame: Frame) -> bytes:
        """The payload of a frame. Raises JournalCorrupt where it is damaged, or OSError."""
        with named(self._path(frame.segment), "read"):
            data = os.pread(self._readable(frame.segment), _HEAD.size + frame.length, frame.offset)
        payload = _decode(data, 0)
        if payload is None or len(payload) != frame.length:
            raise JournalCorrupt(f"{self._path(frame.segment)} has a bad frame at byte {frame.offset}")
        return payload

    def scan(
        self, segment: int = 1, offset: int = 0, last: int | None = None
    ) -> Iterator[tuple[Frame, bytes]]:
        """All frames from there on, in order, to the end of the last segment or of the one given."""
        for number in range(segment, (last or self._last) + 1):
            data = self._path(number).read_bytes()
            while offset < len(data):
                payload = _decode(data, offset)
                if payload is None:
                    raise JournalCorrupt(f"{self._path(number)} has a bad frame at byte {offset}")
                yield Frame(number, offset, len(payload)), payload
                offset += _HEAD.size + len(payload)
            offset = 0

    def _readable(self, segment: int) -> int:
        """A descriptor to read the segment with. Reads go through few segments for long."""
        if segment not in self._reading:
            while len(self._reading) >= MAX_READING:
                os.close(self._reading.pop(next(iter(self._reading))))
            self._reading[segment] = os.open(self._path(segment), os.O_RDONLY)
        return self._reading[segment]

    def sealed(self) -> list[tuple[int, int]]:
        """Number and bytes of every segment but the last."""
        return [(number, self._path(number).stat().st_size) for number in range(1, self._last)]

    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return self._end + sum(size for _, size in self.sealed())

    def rewrite(self, segment: int, payloads: Iterable[bytes]) -> Path:
        """A synced file that can replace a sealed segment."""
        assert segment < self._last, segment
        descriptor, name = tempfile.mkstemp(f"{segment:06d}{REWRITTEN}", dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                for payload in payloads:
                    file.write(_encode(payload))
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            os.unlink(name)
            raise
        return Path(name)

    def replace(self, segment: int, rewritten: Path) -> None:
        """Puts a file made by `rewrite` into the place of its sealed segment. Raises OSError."""
        assert segment < self._last, segment
        rewritten.replace(self._path(segment))
        if segment in self._reading:
            os.close(self._reading.pop(segment))

    def holds(self, frame: Frame) -> bool:
        """Whether the frame lies inside what is on disk."""
        if not 1 <= frame.segment <= self._last:
            return False
        end = self._end if frame.segment == self._last else self._path(frame.segment).stat().st_size
        return end_of(frame) <= end

    def syncer(self) -> Callable[[], None]:
        """What makes everything appended so far survive a power cut; meant for a thread, called exactly once.

        It owns its own descriptor, because appending may meanwhile go on to the next segment.
        """
        path = self._path(self._last)
        with named(path, "synced"):
            file = os.dup(self._file)

        def sync() -> None:
            try:
                with named(path, "synced"):
                    os.fsync(file)
            finally:
                os.close(file)

        return sync

    def close(self) -> None:
        """Closes every file, once; nothing is read or appended afterwards."""
        if self._cut_is_owed:
            self._leave_nothing()
        os.close(self._file)
        for descriptor in self._reading.values():
            os.close(descriptor)
        self._reading.clear()

    def _path(self, number: int) -> Path:
        if number not in self._paths:
            self._paths[number] = self.folder / f"{number:06d}.seg"
        return self._paths[number]

    def _start_segment(self) -> None:
        # Without O_EXCL: an attempt that failed below left an empty file.
        file = os.open(self._path(self._last + 1), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            flush(self.folder)
        except OSError:
            os.close(file)
            raise
        self._file, self._last, self._end = file, self._last + 1, 0

    def _cut_torn_tail(self) -> int:
        data = self._path(self._last).read_bytes()
        end = 0
        while end < len(data):
            payload = _decode(data, end)
            if payload is None:
                break
            end += _HEAD.size + len(payload)
        if end < len(data):
            if (whole := _whole_frame_after(data, end)) is not None:
                raise JournalCorrupt(
                    f"{self._path(self._last)} has a bad frame at byte {end} and a whole one behind it, "
                    f"at byte {whole}"
                )
            self.torn_bytes = len(data) - end
            os.truncate(self._path(self._last), end)
        return end


@contextmanager
def named(path: Path, done: str) -> Iterator[None]:
    """Whoever has to mend it is told which file, and what to do: an error of a descriptor names none."""
    try:
        yield
    except BlockingIOError:
        raise  # held by somebody, who is named
    except OSError as error:
        told = str(error)
        if error.strerror:  # else it is told already
            told = "; ".join(filter(None, [error.strerror, remedy_of(error.errno)]))
        failed = OSError(f"{error.filename or path} cannot be {done}: {told}")
        failed.errno = error.errno
        raise failed from error


def _whole_frame_after(data: bytes, offset: int) -> int | None:
    """Where the first whole frame behind a bad one begins, if there is one."""
    for match in _PAYLOAD_START.finditer(data, offset + 1 + _HEAD.size):
        if _decode(data, match.start() - _HEAD.size) is not None:
            return match.start() - _HEAD.size
    return None


def _encode(payload: bytes) -> bytes:
    length = struct.pack("<I", len(payload))
    return _HEAD.pack(len(payload), xxhash.xxh3_64_intdigest(length + payload)) + payload


def _decode(data: bytes, offset: int) -> bytes | None:
    """The payload of the frame at the offset, or None where there is no whole, true frame."""
    if offset + _HEAD.size > len(data):
        return None
    length, digest = _HEAD.unpack_from(data, offset)
    if not 0 < length <= MAX_PAYLOAD_BYTES:
        return None
    payload = data[offset + _HEAD.size : offset + _HEAD.size + length]
    if len(payload) != length or xxhash.xxh3_64_intdigest(data[offset : offset + 4] + payload) != digest:
        return None
    return payload
