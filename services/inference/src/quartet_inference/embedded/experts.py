"""Which experts of a mixture took each token, noted as the routers of the model choose.

1. Noting changes nothing that is computed.
2. What is noted of a token is the choice that its keys and values, and the draw after it, came from (noted.py
   says what becomes of it when they are computed anew).
3. A model that has no routers, or one whose router does not tell its choice, is refused.

Shapes: B rows, T tokens, N routers, k experts that take a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from quartet_inference.embedded.forward import Forward
from quartet_inference.engine import Experts

#: More experts take two bytes each.
MOST_OF_A_BYTE = 256


def routers_of(model: Any) -> list[nn.Module]:
    """The routers of a model in its order, where transformers itself says that it has some."""
    recorder = (model.base_model._can_record_outputs or {}).get("router_logits")
    if not isinstance(recorder, OutputRecorder):
        return []
    return [module for module in model.modules() if isinstance(module, recorder.target_class)]


@dataclass(frozen=True)
class _Pass:
    first_row: int
    positions_BT: np.ndarray[Any, np.dtype[np.int64]]
    experts_BTNk: Experts


class NotingForward:
    """A forward pass that notes the experts of its tokens until they are taken."""

    def __init__(self, forward: Forward, model: Any) -> None:
        """Errors: ValueError, where there is nothing to note."""
        self._forward = forward
        self._routers = routers_of(model)
        self._chosen: list[Tensor] | None = None
        self._passes: list[_Pass] = []
        name = type(model).__name__
        if not self._routers:
            raise ValueError(
                f"routed_experts = true (a run's algorithm.router_replay asks for it): {name} has no routers "
                "that transformers tells of; leave it out"
            )
        for router in self._routers:
            router.register_forward_hook(self._note)
        self._chosen = []
        with torch.inference_mode():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
        told, self._chosen = self._chosen, None
        if len(told) != len(self._routers) or len({one.shape for one in told}) != 1:
            raise ValueError(f"routed_experts = true: the routers of {name} do not tell what they choose")
        self.layers, self.slots = len(told), told[0].shape[-1]

    def _note(self, router: nn.Module, _inputs: object, output: object) -> None:
        if self._chosen is None:
            return
        if isinstance(output, tuple) and len(output) >= 3 and not output[2].is_floating_point():
            narrow = torch.uint8 if output[0].shape[-1] <= MOST_OF_A_BYTE else torch.int16
            self._chosen.append(output[2].to(narrow))

    def __call__(
        self, first_row: int, ids_BT: Tensor, positions_BT: Tensor, context: int, last_B: Tensor | None
    ) -> Tensor:
        self._chosen = []
        try:
            logits = self._forward(first_row, ids_BT, positions_BT, context, last_B)
            experts_TNk = torch.stack(self._chosen, 1).cpu().numpy()
        finally:
            self._chosen = None
        if experts_TNk.dtype == np.int16:
            experts_TNk = experts_TNk.view(np.uint16)
        shape = (*ids_BT.shape, self.layers, self.slots)
        self._passes.append(_Pass(first_row, positions_BT.cpu().numpy(), experts_TNk.reshape(shape)))
        return logits

    def begin(self) -> None:
        """Forget what nobody took: a pass has failed."""
        self._passes.clear()

    def take(self, spans: Sequence[tuple[int, int, int]]) -> list[Experts]:
        """What was noted of each (row, first position, end); nothing is known any more after that."""
        told = [_of_span(self._passes, *span) for span in spans]
        self._passes.clear()
        return told


def _of_span(passes: Sequence[_Pass], row: int, start: int, end: int) -> Experts:
    parts = []
    for one in passes:
        if one.first_row <= row < one.first_row + len(one.positions_BT):
            positions_T = one.positions_BT[row - one.first_row]
            # Padding stands at the end itself.
            parts.append(one.experts_BTNk[row - one.first_row, positions_T < end])
    told = np.concatenate(parts)
    assert len(told) == end - start, "every position is computed once"
    return told
