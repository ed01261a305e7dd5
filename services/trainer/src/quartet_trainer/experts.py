"""Experts of a mixture under autocast: their grouped products take its dtype, as every other product does.

PyTorch's grouped product is not among those that autocast narrows: with float32 masters all experts would be
computed in float32, where everything around them is computed in bfloat16.

Without autocast, and in models whose experts transformers does not group, nothing changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

NAME = "quartet_trainer_autocast"


def use(model: Any) -> None:
    """Let a transformers model that groups its experts' products take these."""
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        model.set_experts_implementation(NAME)


def weights(model: Any) -> frozenset[str]:
    """Parameters of a model that autocast casts here, wherever they are used.

    Not those of experts that peft has modules around: what it adds to them is cast with them (stacked.py).
    """
    if getattr(model.config, "_experts_implementation", None) != NAME:
        return frozenset()
    return frozenset(
        f"{name}.{own}"
        for name, module in model.named_modules()
        # What transformers writes into a module whose products an experts function computes.
        if "is_concatenated" in vars(module) and not name.endswith(".base_layer")
        for own, _ in module.named_parameters(recurse=False)
    )


class _Narrowed:
    """A module whose parameters are seen in another dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) else value


def experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An experts function of transformers."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        module = _Narrowed(module, torch.get_autocast_dtype(device))
    # It casts what is multiplied to the dtype of the weights, and the result back.
    output: Tensor = grouped_mm_experts_forward(module, hidden, top_k_index, top_k_weights)
    return output


ExpertsInterface.register(NAME, experts)
