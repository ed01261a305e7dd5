"""Tensors that are whole in this process, or spread over the ranks (DTensor), as the rest of the trainer
handles them: without asking which.

1. What is done to a spread tensor here is done by all ranks at once, with the same tensor.
2. A copy on the host is spread as its original is: no rank holds more than its part.
3. One process never imports torch.distributed.tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np
import torch
from quartet.weights import pages
from torch import Tensor


def is_whole(tensor: Tensor) -> bool:
    """Whether all of it is in this process."""
    return not hasattr(tensor, "to_local")


def whole(tensor: Any) -> Tensor:
    """All of it, on its device."""
    return cast(Tensor, tensor if is_whole(tensor) else tensor.full_tensor())


def at_first(tensor: Any) -> Tensor | None:
    """All of a tensor on the host in the first rank; None in the others, which give their parts."""
    if is_whole(tensor):
        return cast(Tensor, tensor)
    from torch.distributed import gather

    mesh, mine = tensor.device_mesh, part(tensor)
    # FSDP2 cuts as torch.chunk does: the last parts may be shorter, or empty.
    rows = -(-tensor.shape[0] // mesh.size())
    padded = mine.new_zeros(rows, *tensor.shape[1:])
    padded[: len(mine)] = mine
    # Ranks on CUDA have NCCL between them, which is tens of times faster than gloo.
    over_nccl = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    given = padded.view(torch.uint8).to("cuda" if over_nccl else "cpu")
    first = mesh.get_local_rank() == 0
    parts = [torch.empty_like(given) for _ in range(mesh.size() if first else 0)]
    gather(given, parts or None, dst=0)
    return torch.cat(parts).cpu().view(mine.dtype)[: tensor.shape[0]] if first else None


def part(tensor: Any) -> Tensor:
    """What this process holds of it: its memory, not a copy."""
    return cast(Tensor, tensor if is_whole(tensor) else tensor.to_local())


def on_host(tensor: Any, dtype: torch.dtype) -> Tensor:
    """A copy on the CPU, contiguous, spread alike."""
    mine = part(tensor.detach())
    if mine.device.type != "cpu":
        # There, before it travels: the other way round it travels as wide as it is, and the CPU casts it.
        mine = mine.to(dtype)
    memory = np.frombuffer(pages.take(mine.numel() * dtype.itemsize), np.uint8)
    copy = torch.from_numpy(memory).view(dtype).view(mine.shape).copy_(mine)
    if is_whole(tensor):
        return copy
    return _spread(copy, tensor, host_mesh())


def like(values: Any, pattern: Any) -> Tensor:
    """A copy of values on the device of a pattern of their shape, spread as that is.

    The values are spread alike already, or whole in every rank.
    """
    mine = part_like(values, pattern).to(part(pattern).device, copy=True)
    return mine if is_whole(pattern) else _spread(mine, pattern, pattern.device_mesh)


def host_like(values: Any, pattern: Any) -> Tensor:
    """The same, but on the host, from where CUDA copies it at full speed."""
    mine = part_like(values, pattern)
    # Pinned memory comes in powers of two: up to twice as much is taken.
    pinned = part(pattern).device.type == "cuda"
    copy = torch.empty(mine.shape, dtype=mine.dtype, pin_memory=pinned).copy_(mine)
    return copy if is_whole(pattern) else _spread(copy, pattern, host_mesh())


def part_like(values: Any, pattern: Any) -> Tensor:
    """What this process holds of values if they are spread as a pattern is; as `like`, no copy."""
    if is_whole(pattern):
        return whole(values)
    return _chunk(values, pattern.device_mesh) if is_whole(values) else part(values)


def spread(values: Tensor) -> Tensor:
    """This rank's part of what is whole on the host, as FSDP2 would cut it."""
    from torch.distributed.tensor import DTensor, Shard

    local = _chunk(values, host_mesh()).clone()
    return DTensor.from_local(
        local, host_mesh(), [Shard(0)], run_check=False, shape=values.shape, stride=values.stride()
    )


def empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory for this rank's part of a tensor, on the host."""
    return spread(torch.empty(shape, dtype=dtype))


@cache
def host_mesh() -> Any:
    """All ranks, for tensors on the CPU."""
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (get_world_size(),))


def _chunk(values: Tensor, mesh: Any) -> Tensor:
    chunks = torch.chunk(values, mesh.size())
    rank = mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else values[:0]


def _spread(local: Tensor, pattern: Any, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, mesh, pattern.placements, run_check=False, shape=pattern.shape, stride=pattern.stride()
    )
