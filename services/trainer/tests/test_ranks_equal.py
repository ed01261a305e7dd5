"""Two ranks compute what one process computes: losses, norms, weights, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.fetch import fetch_version

STEPS = 20
TOLERANCE = 1e-6
#: torch's Muon orthogonalises in bfloat16: a gradient that differs in its last bit may round to another value
#: there, which is 0.4 % of an element.
MUON_TOLERANCE = 1e-5


async def trained(
    trainer: Any, run_id: str, make_samples: Any, steps: int, loss: pb.LossSpec | None = None, **spec: Any
) -> Any:
    """Losses and gradient norms of some steps, and the weights that they lead to."""
    await trainer.create(run_id, **spec)
    seen = []
    for step in range(steps):
        samples = make_samples(seed=step)
        done = await trainer.forward_backward(2 * step + 1, samples, run_id, loss=loss)
        stepped = await trainer.stub.OptimStep(pb.OptimStepRequest(run_id=run_id, seq_id=2 * step + 2))
        seen.append((done.loss, stepped.grad_norm))
    request = pb.PublishWeightsRequest(run_id=run_id, seq_id=2 * steps + 1)
    published = await trainer.stub.PublishWeights(request)
    fetched = await fetch_version(trainer.channel, run_id, published.version)
    weights = {name: np.frombuffer(one.data, np.float32) for name, one in fetched.tensors.items()}
    return np.array(seen), weights


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("adamw", {"learning_rate": 1e-4, "max_grad_norm": 1.0}),
        ("sgd", {"kind": pb.OPTIMIZER_KIND_SGD, "learning_rate": 1e-3, "weight_decay": 0.1}),
        ("muon", {"kind": pb.OPTIMIZER_KIND_MUON, "learning_rate": 1e-4, "max_grad_norm": 1.0}),
        ("recomputed", {"learning_rate": 1e-4, "gradient_checkpointing": True}),
        ("lora", {"learning_rate": 1e-4, "lora": pb.LoraSpec(rank=4, alpha=8.0)}),
    ],
)
async def test_two_ranks_equal_one_process(
    serve_trainer: Callable[..., Any],
    call_ranks: Callable[..., Any],
    folder: Path,
    make_samples: Any,
    name: str,
    spec: dict[str, Any],
) -> None:
    async with serve_trainer() as alone:
        seen, weights = await trained(alone, name, make_samples, STEPS, base_model=str(folder), **spec)
    async with call_ranks() as group:
        seen2, weights2 = await trained(group, name, make_samples, STEPS, base_model=str(folder), **spec)
    apart = max(float(np.abs(weights[key] - weights2[key]).max()) for key in weights)
    relative = float((np.abs(seen - seen2) / np.abs(seen)).max())
    print(f"{name}: weights apart {apart:.2g}, losses and norms apart {relative:.2g} (relative)")
    assert weights.keys() == weights2.keys()
    tolerance = MUON_TOLERANCE if name == "muon" else TOLERANCE
    assert apart <= tolerance
    assert (np.abs(seen - seen2).max(0) <= 10 * tolerance * np.abs(seen).max(0)).all()
