"""Losses and gradients that are no numbers: the step is skipped, counted, and the run goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer import passes
from quartet_trainer.loss import token_losses

#: Dividing by these makes a loss infinite in float32, or leaves it finite and makes the norm overflow.
INFINITE_LOSS, INFINITE_NORM = 1e-300, 1e-30


async def status(trainer: Any) -> tuple[int, int, int]:
    run = (await trainer.stub.GetRun(pb.GetRunRequest(run_id="r"))).run
    return run.applied_seq_id, run.policy_version, run.skipped_steps


@pytest.mark.parametrize("normalizer", [INFINITE_LOSS, INFINITE_NORM])
async def test_a_step_that_is_no_number_is_skipped_and_the_run_goes_on(
    folder: Path, serve_trainer: Any, make_samples: Any, normalizer: float
) -> None:
    """run.py 4 and 5."""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        before = (await trainer.publish(1)).digest
        done = await trainer.forward_backward(2, make_samples(), normalizer=normalizer)
        assert math.isfinite(done.loss) == (normalizer == INFINITE_NORM)
        skipped = await trainer.optim_step(3)
        assert skipped.skipped_nonfinite and not math.isfinite(skipped.grad_norm)
        assert skipped.policy_version == 1
        # The version counts; the weights are those of the one before.
        assert (await trainer.publish(4)).digest == before
        await trainer.forward_backward(5, make_samples())
        stepped = await trainer.optim_step(6)
        assert not stepped.skipped_nonfinite and math.isfinite(stepped.grad_norm)
        assert (await trainer.publish(7)).digest != before
        assert await status(trainer) == (7, 2, 1)


async def test_a_skipped_step_leaves_moments_and_their_count_alone(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """Invariant 9, run.py 5: also for a run that was restored between the skipped step and the next."""
    batches = [make_samples(seed=seed) for seed in range(2)]
    spec = {"base_model": str(folder), "beta1": 0.5}
    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        await trainer.forward_backward(1, batches[0])
        await trainer.optim_step(2)
        await trainer.forward_backward(3, batches[1])
        await trainer.optim_step(4)
        never_skipped = (await trainer.publish(5)).digest
    digests = []
    async with serve_trainer() as trainer:
        await trainer.create("skips", **spec)
        seq_id = 0

        async def call(samples: Any, **start: Any) -> Any:
            nonlocal seq_id
            await trainer.forward_backward(seq_id + 1, samples, run_id="skips", **start)
            seq_id += 2
            return await trainer.stub.OptimStep(pb.OptimStepRequest(run_id="skips", seq_id=seq_id))

        await call(batches[0])
        assert (await call(batches[0], normalizer=INFINITE_LOSS)).skipped_nonfinite
        await trainer.stub.SaveState(pb.SaveStateRequest(run_id="skips", seq_id=5, name="a"))
    for _ in range(2):
        async with serve_trainer() as trainer:
            run = await trainer.create("skips", **spec)
            assert (run.policy_version, run.skipped_steps, run.applied_seq_id) == (2, 1, 5)
            seq_id = 5
            await call(batches[1])
            publish = pb.PublishWeightsRequest(run_id="skips", seq_id=8)
            digests.append((await trainer.stub.PublishWeights(publish)).digest)
    assert digests == [never_skipped, never_skipped]


async def test_the_schedule_goes_on_over_a_step_that_is_skipped(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """run.py 4. A rate that is given holds for one step, 0 among them."""
    schedule = {"schedule": pb.SCHEDULE_LINEAR, "total_steps": 4, "learning_rate": 4e-3}
    rates = []
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), **schedule)
        for number, given in enumerate((None, None, 0.0, None)):
            normalizer = INFINITE_LOSS if number == 1 else 1.0
            await trainer.forward_backward(2 * number + 1, make_samples(), normalizer=normalizer)
            done = await trainer.optim_step(2 * number + 2, learning_rate=given)
            assert done.skipped_nonfinite == (number == 1)
            rates.append(done.learning_rate)
    assert rates == pytest.approx([4e-3, 3e-3, 0.0, 1e-3])


async def test_a_loss_that_is_no_number_skips_though_its_gradients_look_sound(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_number(*args: Any) -> torch.Tensor:
        return token_losses(*args) + math.inf

    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        monkeypatch.setattr(passes, "token_losses", without_number)
        assert (await trainer.forward_backward(1, make_samples())).loss == math.inf
        monkeypatch.undo()
        await trainer.save(2, "between")
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.forward_backward(3, make_samples(seed=1))
        skipped = await trainer.optim_step(4)
        assert skipped.skipped_nonfinite and math.isfinite(skipped.grad_norm)
        assert await status(trainer) == (4, 1, 1)
        await trainer.forward_backward(5, make_samples(seed=1))
        assert not (await trainer.optim_step(6)).skipped_nonfinite
