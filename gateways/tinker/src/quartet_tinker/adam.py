"""AdamParams of a step, and what of them a run is created with.

The contract has the learning rate in each step and everything else in the run. The SDK says all of it with
each step, first after gradients are there; so a run begins with the SDK's own defaults, and is made again
where its first step says otherwise (training.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quartet.v1 import trainer_service_pb2 as pb

from quartet_tinker.refusal import Refused


@dataclass(frozen=True)
class Adam:
    """What stays the same over a run's steps. The defaults are the SDK's."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def spec(self) -> pb.OptimizerSpec:
        """As the contract has it; the learning rate is given with each step."""
        return pb.OptimizerSpec(
            learning_rate=1e-4,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.grad_clip_norm,
        )

    def difference(self, other: Adam) -> str:
        """The first value that differs, as "beta1 = 0.9"."""
        mine, theirs = asdict(self), asdict(other)
        return next((f"{key} = {theirs[key]:g}" for key in mine if mine[key] != theirs[key]), "")


def of(spec: pb.OptimizerSpec) -> Adam:
    """What a run was created with."""
    return Adam(spec.beta1, spec.beta2, spec.eps, spec.weight_decay, spec.max_grad_norm)


def read(params: Mapping[str, Any]) -> tuple[float, Adam]:
    """The learning rate of a step and the rest. Raises Refused."""
    values = {"learning_rate": 1e-4, **asdict(Adam())}
    for key, value in params.items():
        if key not in values:
            raise Refused(f"adam_params.{key} is not served here; give {', '.join(values)}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and value >= 0):
            raise Refused(f"adam_params.{key} = {value!r} is refused; give a finite number, 0 or more")
        # The trainer would say so only when the run is made again, which it then no longer has.
        if key in ("beta1", "beta2") and value >= 1:
            raise Refused(f"adam_params.{key} = {value!r} is refused; give a number below 1")
        if key == "eps" and not value:
            raise Refused("adam_params.eps = 0 is refused; give a number above 0")
        values[key] = float(value)
    learning_rate = values.pop("learning_rate")
    return learning_rate, Adam(**values)
