"""The proximal policy of a batch that takes several steps: the policy that the first of them began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.store import WeightStore
from quartet_trainer.bases import Bases
from quartet_trainer.machine import Machine
from quartet_trainer.run import Run
from quartet_trainer.sample import make_sample
from quartet_trainer.spec import LoraSpec, LossSpec, OptimizerSpec, RunSpec

LORA = pb.LoraSpec(rank=3, alpha=5.0)
MERGED = pb.LoraSpec(rank=3, alpha=5.0, publish_merged=True)
# What is computed in, what is published in, and of what.
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"compute_dtype": "bfloat16", "served_dtype": "bfloat16"},
    "published in bfloat16": {"compute_dtype": "float32", "served_dtype": "bfloat16"},
    "merged": {"compute_dtype": "float32", "served_dtype": "bfloat16", "lora": MERGED},
    "merged, computed in bfloat16": {"compute_dtype": "bfloat16", "served_dtype": "float32", "lora": MERGED},
    "adapter": {"compute_dtype": "bfloat16", "served_dtype": "bfloat16", "lora": LORA},
    "float32": {"compute_dtype": "float32", "served_dtype": "float32"},
}
# Of these what is published computes what the live weights do.
EXACT = ("float32",)


def gspo(version: int, *, returns: bool) -> pb.LossSpec:
    """With the clips of its paper."""
    return pb.LossSpec(
        kind=pb.LOSS_KIND_POLICY_GRADIENT,
        ratio=pb.RATIO_TREATMENT_PPO,
        ratio_level=pb.RATIO_LEVEL_SEQUENCE,
        aggregation=pb.AGGREGATION_SEQUENCE,
        clip_low=3e-4,
        clip_high=4e-4,
        proximal_version=version,
        proximal_returns=returns,
    )


async def begun(trainer: Any, folder: Path, samples: Any, kind: str) -> None:
    """A run whose weights are not what they are published as; calls 1 to 5."""
    await trainer.create(base_model=str(folder), **KINDS[kind])
    for seq_id in (1, 3):
        await trainer.forward_backward(seq_id, samples)
        await trainer.optim_step(seq_id + 1)
    await trainer.publish(5)


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("kind", KINDS)
async def test_where_nothing_moved_every_ratio_is_one(
    folder: Path, serve_trainer: Any, make_samples: Any, kind: str, returns: bool
) -> None:
    """proximal.py 1, and 3: of who does not say that it returns, that of what was published."""
    samples = make_samples()
    async with serve_trainer() as trainer:
        await begun(trainer, folder, samples, kind)
        for seq_id in (6, 8):
            await trainer.forward_backward(seq_id, samples, loss=gspo(2, returns=returns))
            await trainer.optim_step(seq_id + 1, learning_rate=0.0)
        done = await trainer.forward_backward(10, samples, loss=gspo(2, returns=False))
    found = {name: done.diagnostics[name] for name in ("ratio_max", "ratio_mean", "clipped_fraction")}
    nothing_moved = {"ratio_max": 1.0, "ratio_mean": 1.0, "clipped_fraction": 0.0}
    assert (found == nothing_moved) == (returns or kind in EXACT), found


async def test_a_state_in_the_middle_of_a_batch_has_it(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """proximal.py 2: and one behind it has none."""
    samples, kind = make_samples(), "bfloat16"

    async def rest(trainer: Any) -> list[float]:
        found = []
        for seq_id in (9, 11):
            done = await trainer.forward_backward(seq_id, samples, loss=gspo(2, returns=seq_id == 9))
            stepped = await trainer.optim_step(seq_id + 1)
            found += [done.loss, done.diagnostics["ratio_mean"], stepped.grad_norm]
        return found

    async with serve_trainer() as trainer:
        await begun(trainer, folder, samples, kind)
        await trainer.forward_backward(6, samples, loss=gspo(2, returns=True))
        await trainer.optim_step(7)
        middle = Path((await trainer.save(8, "middle")).path)
        straight = await rest(trainer)
        behind = Path((await trainer.save(13, "behind")).path)
    assert (middle / "proximal.safetensors").is_file() and not (behind / "proximal.safetensors").exists()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), **KINDS[kind])
        await trainer.stub.LoadState(pb.LoadStateRequest(run_id="r", seq_id=14, name="middle"))
        assert await rest(trainer) == straight
    assert straight[1] != 1.0


async def test_what_returns_is_named(folder: Path, serve_trainer: Any, make_samples: Any) -> None:
    unnamed = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, proximal_returns=True)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        refusal = trainer.forward_backward(1, make_samples(), loss=unnamed)
        await trainer.refused(refusal, "INVALID_REQUEST")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_an_adapter_drops_is_no_distance_between_sampler_and_policy(
    folder: Path, dropout: float
) -> None:
    """batch.py: `correction` weighs the proximal policy, without what the first pass drops."""
    spec = RunSpec(
        base_model=str(folder),
        lora=LoraSpec(rank=3, alpha=60.0, dropout=dropout),
        optimizer=OptimizerSpec(learning_rate=0.05),
    )
    run = Run(
        "r", spec, Machine(torch.device("cpu"), 8192, None, False), WeightStore(2), lambda: None, Bases()
    )
    tokens = [[(7 * i + 3 * k) % 50 + 1 for k in range(24)] for i in range(4)]
    covered = [make_sample(i, ids, [(8, 16, 0)], [], []) for i, ids in enumerate(tokens)]
    bounds = {"mode": "mask", "cap": 1.0001, "floor": 0.9999}
    for step in range(3):  # from the second on the adapter is not zero
        sampled = [scores.logprobs for scores in run.forward(covered, None, 1.0)]
        samples = [
            make_sample(i, ids, [(8, 16, 0)], told.tolist(), [(-1.0) ** i])
            for i, (ids, told) in enumerate(zip(tokens, sampled, strict=True))
        ]
        loss = LossSpec(ratio="ppo", proximal_version=step, proximal_returns=True, correction=bounds)
        found = run.forward_backward(samples, loss, 64.0, False).diagnostics
        assert found["correction_bounded_fraction"] == 0.0, step
        run.optim_step(None)
