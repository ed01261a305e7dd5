"""Tensors that are whole in this process, or spread over the ranks (DTensor), as the rest of the trainer
handles them: without asking which.

1. What is done to a spread tensor here is done by all ranks at once, with the same tensor.
2. A copy on the host is spread as its original is: no rank holds more than its part.
3. One process never imports torch.distributed.tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn


def is_whole(tensor: Tensor) -> bool:
    """Whether all of it is in this process."""
    return type(tensor) in (Tensor, nn.Parameter)


def whole(tensor: Any) -> Tensor:
    """All of it, on its device."""
    return cast(Tensor, tensor if is_whole(tensor) else tensor.full_tensor())


def part(tensor: Any) -> Tensor:
    """What this process holds of it: its memory, not a copy."""
    return cast(Tensor, tensor if is_whole(tensor) else tensor.to_local())


def on_host(tensor: Any, dtype: torch.dtype) -> Tensor:
    """A copy on the CPU, spread alike."""
    copy = part(tensor.detach()).to("cpu", dtype, copy=True).contiguous()
    if is_whole(tensor):
        return copy
    return _spread(copy, tensor, host_mesh())


def like(values: Any, pattern: Any) -> Tensor:
    """A copy of values on the device of a pattern of their shape, spread as that is.

    The values are spread alike already, or whole in every rank.
    """
    if is_whole(pattern):
        return whole(values).to(pattern.device, copy=True)
    if is_whole(values):
        rank, ranks = pattern.device_mesh.get_local_rank(), pattern.device_mesh.size()
        chunks = torch.chunk(values, ranks)
        values = chunks[rank] if rank < len(chunks) else values[:0]
    return _spread(part(values).to(part(pattern).device, copy=True), pattern, pattern.device_mesh)


@cache
def host_mesh() -> Any:
    """All ranks, for tensors on the CPU."""
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (get_world_size(),))


def _spread(local: Tensor, pattern: Any, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, mesh, pattern.placements, run_check=False, shape=pattern.shape, stride=pattern.stride()
    )
