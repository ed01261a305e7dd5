"""AdamW with warm-up, a schedule and clipping, whose whole state can be taken out and put back bit for bit.

1. Masters and moments are float32.
2. Weight decay acts on matrices only; norms and biases are not pulled towards zero.
3. Steps count from 0. The rate of step s follows from the spec and s alone, so a restored run continues on
   its schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from quartet_trainer.spec import OptimizerSpec, Schedule

FIRST = "first."
SECOND = "second."


def scheduled_rate(spec: OptimizerSpec, step: int) -> float:
    """Learning rate of a step. Warm-up rises linearly and reaches the peak in its last step."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    if spec.schedule is Schedule.CONSTANT:
        return spec.learning_rate
    progress = min(1.0, (step - spec.warmup_steps) / (spec.total_steps - spec.warmup_steps))
    if spec.schedule is Schedule.LINEAR:
        return spec.learning_rate * (1.0 - progress)
    return spec.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW over named parameters."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], spec: OptimizerSpec) -> None:
        self._spec = spec
        self._parameters = dict(parameters)
        matrices = [one for one in self._parameters.values() if one.ndim >= 2]
        vectors = [one for one in self._parameters.values() if one.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": spec.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            fused=True,
        )

    @property
    def has_gradients(self) -> bool:
        """Whether anything was accumulated since the last step."""
        return any(parameter.grad is not None for parameter in self._parameters.values())

    def gradient_norm(self) -> float:
        """Norm of all gradients together."""
        gradients = [one.grad for one in self._parameters.values() if one.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def step(self, rate: float, norm: float) -> None:
        """Clip by the norm, step and clear."""
        if 0.0 < self._spec.max_grad_norm < norm:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(self._spec.max_grad_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.clear()

    def clear(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, Tensor]:
        """Both moments by parameter name; empty before the first step."""
        taken: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            state = self._adamw.state.get(parameter)
            if state:
                taken[FIRST + name], taken[SECOND + name] = state["exp_avg"], state["exp_avg_sq"]
        return taken

    def restore(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """Put moments back as they were after `steps` steps."""
        self._adamw.state.clear()
        if not moments:
            return
        for name, parameter in self._parameters.items():
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(steps), dtype=torch.float32, device=parameter.device),
                "exp_avg": moments[FIRST + name].to(parameter.device, copy=True),
                "exp_avg_sq": moments[SECOND + name].to(parameter.device, copy=True),
            }
