"""Checked weights, waiting in a file for every worker to read them.

1. A staged version is a safetensors file of the whole version; workers map it, nothing is sent through vLLM's
   own channels, whose ring buffers are small.
2. The file ends with the object that stands for it, and all of them with the engine. An adapter is a folder
   of its own.
3. The folder asked for is used if it has room, otherwise the temporary folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quartet.errors import QuartetError
from quartet.weights.layout import header_of
from quartet.weights.tensor import Tensor

#: Written at once; the system takes at most 2 GiB.
WRITE_BYTES = 64 << 20


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
        self._wanted = wanted
        self._folders: dict[Path, tempfile.TemporaryDirectory[str]] = {}
        self._count = 0

    def write(self, tensors: Mapping[str, Tensor]) -> StagedFile:
        """Write a version. Not for the event loop."""
        header, names, size = header_of({name: (one.dtype, one.shape) for name, one in tensors.items()})
        self._count += 1
        path = self._folder_for(size) / f"{self._count}.safetensors"
        staged = StagedFile(path, size)
        weakref.finalize(staged, path.unlink, missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write(descriptor, memoryview(header))
            for name in names:
                _write(descriptor, memoryview(tensors[name].data))
        finally:
            os.close(descriptor)
        return staged

    def write_adapter(self, config_json: str, tensors: Mapping[str, Tensor], rank: int) -> StagedAdapter:
        """Write an adapter that fits the model. Not for the event loop."""
        weights = self.write(tensors)
        folder = weights.path.with_suffix(".adapter")
        folder.mkdir(mode=0o700)
        staged = StagedAdapter(folder, rank)
        weakref.finalize(staged, shutil.rmtree, folder, ignore_errors=True)
        os.link(weights.path, folder / "adapter_model.safetensors")  # the other name goes with `weights`
        (folder / "adapter_config.json").write_text(config_json, encoding="utf-8")
        return staged

    def _folder_for(self, size: int) -> Path:
        for parent in (self._wanted, Path(tempfile.gettempdir())):
            if parent.is_dir() and shutil.disk_usage(parent).free > size:
                if parent not in self._folders:
                    self._folders[parent] = tempfile.TemporaryDirectory(prefix="quartet-", dir=parent)
                return Path(self._folders[parent].name)
        raise QuartetError(
            "INTERNAL",
            f"neither {self._wanted} nor {tempfile.gettempdir()} has room for {size} bytes of weights",
        )

    def close(self) -> None:
        """Remove everything."""
        for folder in self._folders.values():
            folder.cleanup()
        self._folders.clear()


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[:WRITE_BYTES]) :]
