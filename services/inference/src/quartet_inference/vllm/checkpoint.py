"""The tensors of a version as the model's checkpoint has them, which is what vLLM loads.

1. transformers names some parameters otherwise than the checkpoint that it reads, or has one where that has
   many: the experts of most mixtures. vLLM takes such a tensor for another one, or ends at its name. So every
   version goes the way back that `save_pretrained` goes, and is loaded like the folder at the start.
2. What a checkpoint has beside parameters, such as the biases that balance experts, is no part of a version:
   it stays what it is in the folder, and is loaded again with every version.
3. What has the same name and shape in both passes as it is; the memory of the others is shared where their
   parts lie in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from quartet.weights.tensor import Tensor
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from quartet_inference.embedded.model import SAFETENSORS_NAMES, as_torch, as_wire
from quartet_inference.engine import ServedWeights
from quartet_inference.layout import Layout
from quartet_inference.text_stream import Detokenize


class Checkpoint:
    """How a model's tensors stand in its checkpoint."""

    def __init__(self, network: nn.Module) -> None:
        """A transformers model as it was loaded. It loses its weights: only what was done to them is kept."""
        saved = network.state_dict()
        buffers = {name: one for name, one in network.named_buffers() if name in saved}
        self._buffers = {
            name: as_wire(one.clone()) for name, one in buffers.items() if one.dtype in SAFETENSORS_NAMES
        }
        self._names = frozenset(saved)
        self._network: Any = network.to("meta")

    @cached_property
    def _moved(self) -> frozenset[str]:
        """Those of another name or shape in the checkpoint."""
        held = dict(self._network.named_parameters()) | dict(self._network.named_buffers())
        held = {name: one for name, one in held.items() if name in self._names}
        back = self._revert(held)
        return frozenset(name for name, one in held.items() if back.get(name) is not one)

    def _revert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        back: dict[str, torch.Tensor] = revert_weight_conversion(self._network, tensors)
        return back

    def tensors(self, version: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A version as a checkpoint. Not for the event loop."""
        whole = {**version, **self._buffers}
        moved = {name: as_torch(whole.pop(name)) for name in self._moved & whole.keys()}
        return whole | {name: as_wire(one) for name, one in self._revert(moved).items()}


@dataclass(frozen=True)
class Held:
    """What is known of the model that vLLM was started with."""

    layout: Layout
    checkpoint: Checkpoint
    digest: bytes
    end_tokens: frozenset[int]
    detokenize: Detokenize
    served: ServedWeights | None
    routers: int = 0  # of which the workers note what they choose
