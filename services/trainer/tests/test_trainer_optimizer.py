"""Schedules, AdamW and clipping against their definitions; state that comes back bit-equal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from quartet_trainer.optimizer import Optimizer, scheduled_rate
from quartet_trainer.spec import OptimizerSpec, Schedule


def test_schedules() -> None:
    constant = OptimizerSpec(learning_rate=2.0, warmup_steps=4)
    assert [scheduled_rate(constant, s) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    linear = OptimizerSpec(learning_rate=2.0, warmup_steps=2, total_steps=6, schedule=Schedule.LINEAR)
    assert [scheduled_rate(linear, s) for s in range(8)] == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    cosine = OptimizerSpec(learning_rate=2.0, total_steps=4, schedule=Schedule.COSINE)
    assert scheduled_rate(cosine, 1) == pytest.approx(1 + math.cos(math.pi / 4))
    assert scheduled_rate(cosine, 4) == 0.0


def test_a_schedule_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="total_steps above warmup_steps"):
        OptimizerSpec(learning_rate=1.0, schedule=Schedule.LINEAR, warmup_steps=5, total_steps=5)


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.nn.Parameter(torch.randn(4, 3, generator=generator)),
        "norm": torch.nn.Parameter(torch.randn(3, generator=generator)),
    }


def set_gradients(held: dict[str, torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in held.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_adamw_equals_its_definition() -> None:
    spec = OptimizerSpec(learning_rate=0.1, beta1=0.8, beta2=0.9, weight_decay=0.05, max_grad_norm=1.0)
    held = parameters()
    optimizer = Optimizer(held.items(), spec)
    ours = {name: parameter.detach().double().numpy().copy() for name, parameter in held.items()}
    first = {name: np.zeros_like(value) for name, value in ours.items()}
    second = {name: np.zeros_like(value) for name, value in ours.items()}
    for step in range(1, 4):
        set_gradients(held, step)
        gradients = {name: parameter.grad.double().numpy().copy() for name, parameter in held.items()}
        norm = math.sqrt(sum((g**2).sum() for g in gradients.values()))
        assert optimizer.gradient_norm() == pytest.approx(norm, rel=1e-6)
        optimizer.step(0.1, optimizer.gradient_norm())
        for name, gradient in gradients.items():
            clipped = gradient * min(1.0, 1.0 / norm)
            first[name] = 0.8 * first[name] + 0.2 * clipped
            second[name] = 0.9 * second[name] + 0.1 * clipped**2
            if name == "matrix":
                ours[name] *= 1 - 0.1 * 0.05
            denominator = np.sqrt(second[name] / (1 - 0.9**step)) + 1e-8
            ours[name] -= 0.1 * first[name] / (1 - 0.8**step) / denominator
            np.testing.assert_allclose(held[name].detach(), ours[name], atol=1e-6)
    assert not optimizer.has_gradients


def test_restored_state_continues_bit_equal() -> None:
    spec = OptimizerSpec(learning_rate=0.1)
    held = parameters()
    optimizer = Optimizer(held.items(), spec)
    for step in range(3):
        set_gradients(held, step)
        optimizer.step(0.1, optimizer.gradient_norm())
    copies = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in held.items()}
    other = Optimizer(copies.items(), spec)
    other.restore({name: tensor.clone() for name, tensor in optimizer.moments().items()}, 3)
    for one, of in ((optimizer, held), (other, copies)):
        set_gradients(of, 9)
        one.step(0.1, one.gradient_norm())
    assert all(torch.equal(held[name], copies[name]) for name in held)
