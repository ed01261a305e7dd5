"""Manifests of exported models, for who sends one and for who writes what it describes.

1. `check_manifest` accepts only manifests that are consistent in themselves, and whose files lie inside their
   folder, each in a place of its own.
2. Equal digests mean equal folders: it covers the name, the size and the contents of every file.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from quartet.errors import QuartetError
from quartet.v1 import model_pb2 as pb

#: Of the largest models there are, in shards of the smallest size that anybody writes.
MAX_FILES = 4096
#: With as many files a manifest fits into one message.
MAX_PATH_BYTES = 512
#: A reader refuses to write more.
MAX_MODEL_BYTES = 4 << 40
#: Of a file, at once.
CHUNK_BYTES = 1 << 20
#: xxh3_128.
DIGEST_BYTES = 16


def is_inside(path: str) -> bool:
    """Whether this names a file in a folder, wherever that lies, and on any system."""
    names = path.split("/")
    return (
        path.isprintable()
        and len(path.encode()) <= MAX_PATH_BYTES
        and not set(path) & {"\\", ":"}
        and not {"", ".", ".."} & set(names)
    )


def digest_of(files: Iterable[pb.ModelFile]) -> bytes:
    """ModelManifest.digest."""
    state = xxhash.xxh3_128()
    for file in files:
        state.update(f"{file.path}\0{file.size_bytes}\0".encode() + file.digest)
    return bytes(state.digest())


def model_bytes(manifest: pb.ModelManifest) -> int:
    """The size of all its files together."""
    return sum(file.size_bytes for file in manifest.files)


def check_manifest(manifest: pb.ModelManifest) -> None:
    """Errors: CHECKSUM_MISMATCH."""
    paths = [file.path for file in manifest.files]
    if not 0 < len(paths) <= MAX_FILES or model_bytes(manifest) > MAX_MODEL_BYTES:
        raise mismatch(f"a model of {len(paths)} files and {model_bytes(manifest)} bytes")
    if outside := [path for path in paths if not is_inside(path)]:
        raise mismatch(f"the file name {outside[0]!r}")
    folders = {path[:at] for path in paths for at, letter in enumerate(path) if letter == "/"}
    if paths != sorted(set(paths)) or folders & set(paths):
        raise mismatch("the order of the files")
    if any(len(file.digest) != DIGEST_BYTES for file in manifest.files):
        raise mismatch("a file's digest")
    if digest_of(manifest.files) != manifest.digest:
        raise mismatch("the manifest's digest")


def mismatch(what: str) -> QuartetError:
    """CHECKSUM_MISMATCH of a thing, which no other try mends."""
    remedy = "take another state, or see to the trainer's disk"
    return QuartetError("CHECKSUM_MISMATCH", f"{what} is not that of a sound model; {remedy}", what=what)
