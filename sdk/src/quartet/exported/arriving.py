"""A model's folder as it comes, file by file, each byte in its order.

1. A file stays only with the size and the digest of the manifest.
2. A chunk that is damaged, or does not belong where the last one ended, changes nothing.
3. What was accepted is never asked for again: `place` is where to go on.

Writes to a disk: not for an event loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

import xxhash

from quartet.errors import QuartetError
from quartet.exported.manifest import CHUNK_BYTES, check_manifest, mismatch
from quartet.v1 import model_pb2 as pb


class Arriving:
    """One model, on its way into a folder that does not exist yet."""

    def __init__(self, folder: Path) -> None:
        """Nothing is made before the manifest came."""
        self._folder = folder
        self._next = 0
        self._written = 0
        self._hash = xxhash.xxh3_128()
        self._file: IO[bytes] | None = None
        self.manifest: pb.ModelManifest | None = None

    @property
    def complete(self) -> bool:
        """Whether every file is there."""
        return self.manifest is not None and self._next == len(self.manifest.files)

    @property
    def place(self) -> pb.ModelPlace | None:
        """Where to go on; None at the very beginning, and at the end."""
        if self.manifest is None or self.complete:
            return None
        path = self.manifest.files[self._next].path
        return pb.ModelPlace(digest=self.manifest.digest, path=path, offset=self._written)

    def begin(self, manifest: pb.ModelManifest) -> None:
        """A stream begins; every one with the same manifest. Errors: CHECKSUM_MISMATCH, OSError."""
        if self.manifest is not None:
            if manifest != self.manifest:
                raise mismatch("another model than the one that was begun")
            return
        check_manifest(manifest)
        self._folder.mkdir()
        self.manifest = manifest
        self._finish_full()

    def accept(self, chunk: pb.ModelChunk) -> None:
        """The next bytes. Errors: NOT_READY (damaged on its way: go on), CHECKSUM_MISMATCH, OSError."""
        place = self.place
        if self.manifest is None or place is None or (chunk.path, chunk.offset) != (place.path, place.offset):
            raise mismatch(f"byte {chunk.offset} of {chunk.path!r} at this point")
        room = self.manifest.files[self._next].size_bytes - self._written
        if not 0 < len(chunk.data) <= min(room, CHUNK_BYTES):
            raise mismatch(f"a chunk of {len(chunk.data)} bytes of {chunk.path!r}")
        if xxhash.xxh3_64_intdigest(chunk.data) != chunk.checksum:
            raise QuartetError("NOT_READY", f"byte {chunk.offset} of {chunk.path!r} came damaged")
        if self._file is None:
            self._file = self._opened(chunk.path)
        self._file.write(chunk.data)
        self._hash.update(chunk.data)
        self._written += len(chunk.data)
        self._finish_full()

    def _opened(self, path: str) -> IO[bytes]:
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.open("xb")

    def _finish_full(self) -> None:
        """Ends the file that has all of its bytes, and the empty ones behind it."""
        assert self.manifest is not None
        files = self.manifest.files
        while self._next < len(files) and self._written == files[self._next].size_bytes:
            file = files[self._next]
            (self._file or self._opened(file.path)).close()
            if self._hash.digest() != file.digest:
                raise mismatch(f"the contents of {file.path!r}")
            self._next, self._written = self._next + 1, 0
            self._file, self._hash = None, xxhash.xxh3_128()

    def close(self) -> None:
        """Nothing more comes."""
        if self._file is not None:
            self._file.close()
