"""The tensors of a state as one process keeps them: a file of safetensors for each stem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file

from quartet_trainer import disk
from quartet_trainer.content import Content, Stems, write_stem


class WholeFiles:
    """One file for each stem. What ranks wrote in parts is read, too (ranks/shards.py)."""

    def write(self, folder: Path, content: Content) -> None:
        """Write whole tensors. Errors: OSError, SafetensorError."""
        for stem, tensors in content.tensors.items():
            write_stem(folder, stem, tensors)

    def read(self, folder: Path) -> Stems:
        """Read whole tensors."""
        stems = {file.stem: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
        if not any(folder.glob("*/shard-*.safetensors")):
            return stems
        from quartet_trainer.ranks.shards import read_whole

        return stems | read_whole(folder)

    def digests(self, folder: Path, names: Sequence[str], progress: Callable[[], None]) -> Mapping[str, str]:
        """Of each of these files. Errors: OSError."""
        return disk.digests(folder, names, progress)
