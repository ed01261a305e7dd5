"""Tensors of a saved state, by torch.distributed.checkpoint: each rank writes and reads its own part.

1. A stem whose tensors are spread is a folder `<stem>/` of safetensors, one file for each rank, which says
   where its parts belong; any number of ranks reads it, one process too. Nothing is pickled.
2. A stem whose tensors are whole is the file that one process writes, `<stem>.safetensors`.
3. Ranks of several machines write into one state_dir: it is a folder that all of them see.
4. Each rank hashes the parts that a rank of its number wrote; the first one whatever else is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from quartet.errors import QuartetError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from quartet_trainer import disk
from quartet_trainer.content import Stems, write_stem
from quartet_trainer.disk import AWAY, FULL, failed
from quartet_trainer.ranks import layout
from quartet_trainer.ranks.alone import Ranks

if TYPE_CHECKING:
    from quartet_trainer.ranks.group import Group

#: As torch names the file of a rank.
_NUMBERED = re.compile(r"/shard-(\d+)-")


def write(folder: Path, stems: Stems, ranks: Ranks, host_group: Any) -> None:
    """Write what the ranks hold. Errors: NOT_READY, in all of them."""
    for stem, tensors in stems.items():
        if all(layout.is_whole(tensor) for tensor in tensors.values()):
            ranks.agree(lambda: _write_whole(folder, stem, tensors))  # noqa: B023 - it is called here
            continue
        on_host = {name: layout.on_host(tensor, tensor.dtype) for name, tensor in tensors.items()}
        writer = HuggingFaceStorageWriter(str(folder / stem), save_distributed=True)
        try:
            save_shards(on_host, storage_writer=writer, process_group=host_group)
        except CheckpointException as error:
            rank, (why, _) = next(iter(error.failures.items()))
            raise unwritten(folder, f"rank {rank}: {why}") from error


def _write_whole(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    # Other ranks hear of an error of the contract, and of no other.
    try:
        write_stem(folder, stem, tensors)
    except (OSError, SafetensorError) as error:
        raise unwritten(folder, str(error)) from error


def unwritten(folder: Path, why: str) -> QuartetError:
    """What is said of a folder that has no room, or is no more."""
    return failed(f"a state cannot be written to {folder}", why, None, FULL)


def digests(
    folder: Path, names: Sequence[str], group: Group, progress: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """The xxh3_128 of each of these files below a folder. Errors: NOT_READY, in all ranks."""
    own = [name for name in names if _number(name) % group.size == group.rank]
    found: dict[str, str] = {}
    refused = None
    try:
        found = disk.digests(folder, own, progress)
    except OSError as error:
        what = f"rank {group.rank} cannot read the state in {folder}"
        refused = failed(what, error.strerror or str(error), error.errno, AWAY)
    group.settle(refused)
    for one in group.of_each(json.dumps(found).encode()):
        found |= json.loads(one)
    return found


def _number(name: str) -> int:
    """Of the rank that wrote a file, whose name counts from 1; the first one wrote those that have none."""
    numbered = _NUMBERED.search(name)
    return int(numbered[1]) - 1 if numbered else 0


def read(folder: Path, spread: bool, host_group: Any) -> dict[str, dict[str, Tensor]]:
    """What was written, on the host. `spread`: in parts, also where one process wrote it."""
    stems = {}
    for file in sorted(folder.glob("*.safetensors")):
        # Mapped, not read: of a tensor that is spread here only this rank's part is ever touched.
        tensors = load_file(file)
        stems[file.stem] = {name: layout.spread(one) for name, one in tensors.items()} if spread else tensors
    return stems | _read_shards(folder, layout.empty, process_group=host_group)


def read_whole(folder: Path) -> dict[str, dict[str, Tensor]]:
    """What ranks wrote, by one process."""
    return _read_shards(folder, lambda shape, dtype: torch.empty(shape, dtype=dtype), no_dist=True)


def _read_shards(
    folder: Path, empty: Callable[[torch.Size, torch.dtype], Tensor], **options: Any
) -> dict[str, dict[str, Tensor]]:
    stems = {}
    for inner in sorted({file.parent for file in folder.glob("*/shard-*.safetensors")}):
        reader = HuggingFaceStorageReader(str(inner))
        known = reader.read_metadata().state_dict_metadata
        tensors = {name: empty(one.size, one.properties.dtype) for name, one in known.items()}  # type: ignore[union-attr]
        load_shards(tensors, storage_reader=reader, **options)
        stems[inner.name] = tensors
    return stems
