"""Weights that do not learn, held in the type that they are computed in anyway.

1. Autocast casts the weight of a linear layer before every product, and experts.py those of experts. One that
   never changes is cast once, if no bit of it is lost, as those of a checkpoint in bfloat16: half the memory,
   and no copies are kept for the backward pass. Results are the same, bit for bit.
2. Embeddings, the output layer and whatever autocast leaves alone stay as they are, and so does a model that
   is spread over ranks: FSDP2 gathers the parameters of a block in one type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import xxhash
from torch import nn

from quartet_trainer import experts
from quartet_trainer.ranks.layout import is_whole, whole

#: Around experts there is one module for each of their parameters.
_BETWEEN: Final = re.compile(r"\.(?:(?:base_layer|original_module)\.)+")


def cast_weights(model: Any) -> frozenset[str]:
    """Parameters that autocast casts wherever they are used."""
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    apart = {id(parameter) for module in ends if module is not None for parameter in module.parameters()}
    named = dict(model.named_parameters())
    weights = {f"{name}.weight" for name in linear} & named.keys()
    return experts.weights(model) | {name for name in weights if id(named[name]) not in apart}


def narrow(model: Any, frozen: Mapping[str, nn.Parameter], dtype: torch.dtype | None) -> None:
    """Hold the parameters of a model that never change in the type of autocast; None: there is none."""
    if dtype is None:
        return
    for name in sorted(cast_weights(model) & frozen.keys()):
        weight = frozen[name]
        if weight.dtype == dtype or not is_whole(weight):
            continue
        narrowed = weight.detach().to(dtype)
        if torch.equal(narrowed.to(weight.dtype), weight.detach()):
            weight.data = narrowed


@contextmanager
def as_float32(model: Any, copied: Collection[str]) -> Iterator[None]:
    """Weights look like float32 inside, where others take their type from them and read no values.

    Modules whose name ends with one in `copied`, as peft reads it, are read, and all below them: they are
    widened for good.
    """
    held: list[tuple[nn.Parameter, torch.Tensor]] = []
    for name, weight in model.named_parameters():
        if weight.dtype == torch.float32:
            continue
        if any(f".{module}." in f".{plain_name(name)}." for module in copied):
            weight.data = weight.detach().float()
        else:
            held.append((weight, weight.data))
            weight.data = torch.zeros((), device=weight.device).expand(weight.shape)
    try:
        yield
    finally:
        for weight, data in held:
            weight.data = data


def digest_of(named: Mapping[str, torch.Tensor], progress: Callable[[], None] = lambda: None) -> str:
    """Of named weights as they were loaded, in whatever type they are held. In all ranks at once; `progress`
    is told of each."""
    state = xxhash.xxh3_128()
    for name, weight in sorted(named.items()):
        progress()
        state.update(name.encode())
        loaded = whole(weight.detach()).cpu().float().contiguous()
        state.update(loaded.view(-1).view(torch.uint8).numpy().data)
    return str(state.hexdigest())


def plain_name(name: str) -> str:
    """The name that a parameter of the model has without adapters, of which peft puts modules between."""
    return _BETWEEN.sub(".", name)
