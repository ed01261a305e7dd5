"""Moments of an optimizer that rest in host memory between steps, for a device that they would fill.

1. A step brings those of one bucket of parameters at a time to the device and takes them back: what it
   computes has the bits of a step whose moments stay there.
2. On the device are at most the moments of a bucket, BUCKET_BYTES, or of a single larger parameter; between
   steps none.
3. At rest they are spread over the ranks as their parameters are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quartet_trainer.ranks.layout import host_like, like, part

#: Of the parameters of a bucket; AdamW's moments are twice that. Enough for copies at full speed.
BUCKET_BYTES = 256 << 20

Named = Mapping[str, nn.Parameter]


def buckets(parameters: Named) -> Iterator[Named]:
    """All of them, in order, in buckets whose moments are on the device together."""
    bucket: dict[str, nn.Parameter] = {}
    held = 0
    for name, parameter in parameters.items():
        size = part(parameter).nbytes
        if bucket and held + size > BUCKET_BYTES:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = parameter
        held += size
    if bucket:
        yield bucket


@contextmanager
def brought(mover: torch.optim.Optimizer, keys: Collection[str]) -> Iterator[None]:
    """The moments of what one of torch's optimizers is about to move, on the device; afterwards at rest."""
    moved = [one for group in mover.param_groups for one in group["params"] if one.grad is not None]
    resting: dict[tuple[int, str], Tensor] = {}
    for parameter in moved:
        state: dict[str, Any] = mover.state.get(parameter, {})
        for key in keys:
            if state.get(key) is not None:
                resting[id(parameter), key] = state[key]
                state[key] = like(state[key], parameter)
    yield
    for parameter in moved:
        state = mover.state[parameter]
        for key in keys:
            if state.get(key) is None:
                continue
            room = resting.get((id(parameter), key))
            if room is None:  # its first step
                state[key] = host_like(state[key], parameter)
            else:
                part(room).copy_(part(state[key]))
                state[key] = room
