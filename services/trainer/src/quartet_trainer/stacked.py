"""Low-rank matrices of stacked experts (`peft.tuners.lora.layer.ParamWrapper`).

peft keeps those of all experts of a stack in one pair of matrices, and puts a module around the experts for
each of their parameters, one around the other: a pair is named by its module, not by the parameter.

Shapes: E experts, r rank, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from quartet_trainer.frozen import plain_name


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack of matrices that has low-rank ones."""

    #: In whose name they stand.
    module: str
    experts: int
    #: Whether the model holds a matrix as [I, O].
    is_transposed: bool

    def product(self, low_erI: Tensor, high_Ore: Tensor) -> Tensor:
        """What is added to the stack, before it is scaled: [E, O, I], or transposed.

        `low_erI` has the rows of one expert after those of another, [E * r, I]; `high_Ore` has their columns
        in turns, [O, r * E].
        """
        low_ErI = low_erI.reshape(self.experts, -1, low_erI.shape[-1])
        high_EOr = high_Ore.reshape(len(high_Ore), -1, self.experts).permute(2, 0, 1)
        product_EOI = high_EOr @ low_ErI
        return product_EOI.transpose(1, 2) if self.is_transposed else product_EOI


def stacks_of(model: Any) -> dict[str, Stack]:
    """Those of a model with adapters in it, by the names that they have without."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            # Of transformers, where it is not a model's own: set where it is true alone.
            is_transposed = bool(getattr(module.get_base_layer(), "is_transposed", False))
            plain = plain_name(f"{name}.{module.parameter_name}")
            found[plain] = Stack(name, module.num_experts, is_transposed)
    return found
