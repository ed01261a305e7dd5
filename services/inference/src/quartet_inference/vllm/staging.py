"""Checked weights, waiting in a file for every worker to read them.

1. A staged version is a safetensors file of the whole version; workers map it, nothing is sent through vLLM's
   own channels, whose ring buffers are small.
2. The file ends with the object that stands for it, and all of them with the engine. An adapter is a folder
   of its own.
3. The folder asked for is used if it has room, otherwise the temporary folder; also where the room is gone by
   the time of writing. What could not be written whole leaves nothing behind.
4. What an engine that was killed has left behind the next one there removes: it may be the memory that it
   was killed for. A folder is locked for as long as its engine lives, in whichever container that is.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quartet.errors import QuartetError
from quartet.weights.layout import header_of
from quartet.weights.tensor import Tensor

T = TypeVar("T")

#: Written at once; the system takes at most 2 GiB.
WRITE_BYTES = 64 << 20
PREFIX = "quartet-staged-"


@dataclass(frozen=True, eq=False)
class StagedFile:
    """One version on its way into the workers."""

    path: Path
    nbytes: int


@dataclass(frozen=True, eq=False)
class StagedAdapter:
    """One version of an adapter, as a folder of peft's."""

    path: Path
    rank: int


class Staging:
    """The folder of an engine's staged versions."""

    def __init__(self, wanted: Path) -> None:
        self._parents = tuple(dict.fromkeys((wanted, Path(tempfile.gettempdir()))))
        self._folders: dict[Path, tempfile.TemporaryDirectory[str]] = {}
        self._locks: list[int] = []
        self._count = 0
        for parent in self._parents:
            _remove_left(parent)

    def write(self, tensors: Mapping[str, Tensor]) -> StagedFile:
        """Write a version. Not for the event loop. Errors: INTERNAL where no folder takes it."""
        parts, size = _parts(tensors)
        return self._somewhere(size, lambda folder: self._version(folder, parts, size))

    def write_adapter(self, config_json: str, tensors: Mapping[str, Tensor], rank: int) -> StagedAdapter:
        """Write an adapter that fits the model. Not for the event loop. Errors: INTERNAL, as above."""
        parts, size = _parts(tensors)
        return self._somewhere(size, lambda folder: self._adapter(folder, config_json, parts, rank))

    def _version(self, folder: Path, parts: Sequence[memoryview], size: int) -> StagedFile:
        path = folder / f"{self._next()}.safetensors"
        _write_file(path, parts)
        staged = StagedFile(path, size)
        weakref.finalize(staged, path.unlink, missing_ok=True)
        return staged

    def _adapter(
        self, folder: Path, config_json: str, parts: Sequence[memoryview], rank: int
    ) -> StagedAdapter:
        path = folder / f"{self._next()}.adapter"
        path.mkdir(mode=0o700)
        try:
            _write_file(path / "adapter_model.safetensors", parts)
            _write_file(path / "adapter_config.json", [memoryview(config_json.encode())])
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        staged = StagedAdapter(path, rank)
        weakref.finalize(staged, shutil.rmtree, path, ignore_errors=True)
        return staged

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _somewhere(self, size: int, write: Callable[[Path], T]) -> T:
        """What is written in the first folder that takes so many bytes."""
        why = []
        for parent in self._parents:
            try:
                free = shutil.disk_usage(parent).free
                if free > size:
                    return write(self._folder_in(parent))
                why.append(f"{parent} has {free} free")
            except OSError as error:
                why.append(f"{parent}: {error.strerror}")
        raise QuartetError("INTERNAL", f"{size} bytes of weights found no room: {'; '.join(why)}")

    def _folder_in(self, parent: Path) -> Path:
        if parent not in self._folders:
            folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
            self._locks.append(os.open(folder.name, os.O_RDONLY))
            fcntl.flock(self._locks[-1], fcntl.LOCK_EX)
            self._folders[parent] = folder
        return Path(self._folders[parent].name)

    def close(self) -> None:
        """Remove everything."""
        for folder in self._folders.values():
            folder.cleanup()
        self._folders.clear()
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()


def _remove_left(parent: Path) -> None:
    """The folders whose engine has ended without removing them."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError:
            continue  # another user's; or its engine was faster
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # it is in use
        finally:
            os.close(lock)


def _parts(tensors: Mapping[str, Tensor]) -> tuple[list[memoryview], int]:
    """What stands in the file of a version, in order, and its size."""
    header, names, size = header_of({name: (one.dtype, one.shape) for name, one in tensors.items()})
    return [memoryview(header), *(memoryview(tensors[name].data) for name in names)], size


def _write_file(path: Path, parts: Sequence[memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for data in parts:
            while data:
                data = data[os.write(descriptor, data[:WRITE_BYTES]) :]
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
