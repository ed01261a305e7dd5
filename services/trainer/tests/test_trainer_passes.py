"""Passes over samples: what scoring leaves alone, and what is heard of a long one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.model import load_model
from quartet_trainer.passes import Machine, Passes
from quartet_trainer.sample import Sample, make_sample

CPU = torch.device("cpu")


def passes_over(model: Any, budget: int, heard: list[int]) -> Passes:
    machine = Machine(CPU, budget, 256, False)
    return Passes(PolicyForward(model, CPU, None), machine, budget, lambda: heard.append(1))


def samples() -> list[Sample]:
    return [
        make_sample(i, [(7 * i + 3 * t) % 96 for t in range(10 + i)], [(4, 6 + i, 0)], [], [])
        for i in range(5)
    ]


def test_promise_2_scoring_other_weights_touches_neither_model_nor_gradients(folder: Path) -> None:
    model = load_model(folder, "m", device=CPU)
    other = load_model(folder, "m", device=CPU, seed=3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = {name: (one.detach().clone(), one.grad) for name, one in model.named_parameters()}
    scored = passes_over(model, 1000, []).score(samples(), dict(other.named_parameters()), 1.0)
    expected = passes_over(other, 1000, []).score(samples(), None, 1.0)
    live = passes_over(model, 1000, []).score(samples(), None, 1.0)
    for ours, theirs, mine in zip(scored, expected, live, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.abs(ours - mine).max() > 0.1
    for name, one in model.named_parameters():
        assert torch.equal(one, before[name][0]) and one.grad is before[name][1]


def test_promise_3_progress_is_heard_after_every_micro_batch(folder: Path) -> None:
    model = load_model(folder, "m", device=CPU)
    for budget, micro_batches in ((1, 5), (1000, 1)):
        heard: list[int] = []
        passes_over(model, budget, heard).score(samples(), None, 1.0)
        assert len(heard) == micro_batches
