"""A model whose every rank holds its part of every parameter (FSDP2, torch.distributed.fsdp.fully_shard).

1. The first rank loads the whole model on its CPU; the others make theirs without memory and get their parts
   tensor by tensor. No rank holds a whole model on its device.
2. A block's parameters are whole only while it computes; gradients are sums over the ranks, not means.
3. Tied weights stay tied. Buffers, which are small, are whole in every rank, and saved where the model saves
   them.
4. Masters are float32; what is gathered is too, so a rank computes what one process would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_tensor

from quartet_trainer.logprobs import PolicyForward, Scoring
from quartet_trainer.ranks import layout


def shard(model: Any, full: Any | None, device: torch.device, mesh: Any) -> Any:
    """Give a model without memory its part of the parameters of `full`, which the first rank has."""
    # transformers names the modules that must not be cut: the blocks.
    blocks = set(model._no_split_modules or ())
    # Inner ones first: Mamba's kin name a block and a part of it.
    for module in reversed(list(model.modules())):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    # Resharded after each forward pass, too: a pass that only scores has no backward pass to do it, and what
    # stayed gathered would be old after the next step.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo cannot scale while it sums.
            module.set_force_sum_reduction_for_comms(True)
    # An expert that got no token on one rank may have got some on another.
    model.set_reduce_scatter_unused_params(True)
    _fill(model, full, device, mesh)
    # A pass enters by the outermost module, where FSDP2 has its hooks (ShardedForward).
    model.forward = _forward
    return model


def _forward(compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    logp_K, measured_K = compute()
    # FSDP2's hooks hang on the results; on a view of another tensor they may be lost.
    return logp_K.clone(), measured_K.clone()


def _fill(model: Any, full: Any | None, device: torch.device, mesh: Any) -> None:
    source = None if full is None else dict(full.named_parameters())
    filled: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        values = _on_device(source, name, parameter, device)
        filled[id(parameter)] = nn.Parameter(distribute_tensor(values, mesh, parameter.placements))
    state = {
        name: filled[id(parameter)] for name, parameter in model.state_dict(keep_vars=True).items()
        if id(parameter) in filled
    }  # fmt: skip
    model.load_state_dict(state, assign=True, strict=False)
    source = None if full is None else dict(full.named_buffers())
    saved = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        values = _on_device(source, name, buffer, device)
        dist.broadcast(values, src=0)
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, nn.Buffer(values, persistent=name in saved))


def _on_device(source: Mapping[str, Tensor] | None, name: str, like: Tensor, device: torch.device) -> Tensor:
    """The tensor of the first rank there; memory for it elsewhere."""
    if source is None:
        return torch.empty(like.shape, dtype=like.dtype, device=device)
    return source[name].detach().to(device)


class ShardedForward(PolicyForward):
    """What a sharded model computes."""

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """As PolicyForward, entered by the model."""
        return self.model(lambda: super(ShardedForward, self).forward(*arguments, **options))  # type: ignore[no-any-return]

    @contextmanager
    def standing_as(self, placed: Mapping[str, Tensor], full_precision: bool = True) -> Iterator[Scoring]:
        """Others lie in the place of spread parameters until the end; each rank moves its part."""
        live = dict(self.model.named_parameters())
        spread = {name: tensor for name, tensor in placed.items() if not layout.is_whole(live[name])}
        rest = {name: tensor for name, tensor in placed.items() if name not in spread}
        held = {name: layout.part(live[name]).detach().clone() for name in spread}
        with torch.no_grad():
            try:
                for name, tensor in spread.items():
                    layout.part(live[name]).copy_(layout.part_like(tensor, live[name]))
                with super().standing_as(rest, full_precision) as scoring:
                    yield scoring
            finally:
                for name, tensor in held.items():
                    layout.part(live[name]).copy_(tensor)
