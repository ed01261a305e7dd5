"""Three ranks, among which few tensors are cut evenly: reference models, states that two go on from; and that
they die with torchrun.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quartet.v1 import trainer_service_pb2 as pb

from .ranked import Ranked, alive, calling
from .test_ranks_death import END_SECONDS
from .test_ranks_equal import TOLERANCE, trained

STEPS = 6
#: So heavy that the reference's part of the gradient outweighs that of the advantages.
LOSS = pb.LossSpec(
    kind=pb.LOSS_KIND_POLICY_GRADIENT, kl_coef=2.0, kl_estimator=pb.KL_ESTIMATOR_K3, temperature=1.0
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, write_qwen3: Callable[..., Path]) -> Path:
    """Of another shape and other weights; the vocabulary is the policy's."""
    return write_qwen3(
        tmp_path_factory.mktemp("teacher"),
        seed=11,
        vocab_size=96,
        hidden_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=56,
        max_position_embeddings=128,
    )


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [("two_ranks", "own"), ("three_ranks", "own"), ("three_ranks", "copy"), ("three_ranks", "follows")],
)
async def test_a_reference_over_ranks_is_that_of_one_process(
    request: pytest.FixtureRequest,
    serve_trainer: Callable[..., Any],
    folder: Path,
    teacher: Path,
    make_samples: Any,
    ranks: str,
    kind: str,
) -> None:
    reference = {
        "own": pb.ReferenceSpec(model=str(teacher)),
        "copy": pb.ReferenceSpec(),
        "follows": pb.ReferenceSpec(sync_steps=2, mixup_alpha=0.5),
    }[kind]
    spec = {"base_model": str(folder), "learning_rate": 1e-4, "max_grad_norm": 1.0, "reference": reference}
    async with serve_trainer() as alone:
        seen, weights = await trained(alone, kind, make_samples, STEPS, LOSS, **spec)
        plain, _ = await trained(alone, "none", make_samples, STEPS, **{**spec, "reference": None})
    async with calling(request.getfixturevalue(ranks)) as group:
        seen2, weights2 = await trained(group, kind, make_samples, STEPS, LOSS, **spec)
    apart = max(float(np.abs(weights[key] - weights2[key]).max()) for key in weights)
    print(f"{ranks}, {kind}: weights apart {apart:.2g}")
    assert apart <= TOLERANCE
    assert (np.abs(seen - seen2).max(0) <= 10 * TOLERANCE * np.abs(seen).max(0)).all()
    assert np.abs(seen - plain).max() > 1e-3, "the reference has a say"


async def test_what_a_reference_does_not_have_all_ranks_refuse_and_go_on(
    two_ranks: Ranked, folder: Path, write_qwen3: Callable[..., Path], tmp_path: Path, make_samples: Any
) -> None:
    small = write_qwen3(
        tmp_path / "small",
        seed=12,
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    async with calling(two_ranks) as group:
        await group.create("small", base_model=str(folder), reference=pb.ReferenceSpec(model=str(small)))
        asking = group.forward_backward(1, make_samples(), "small", loss=LOSS)
        error = await group.refused(asking, "INVALID_REQUEST")
        assert "the vocabulary of the reference model has 40 tokens" in error.message
        assert (await group.forward_backward(1, make_samples(), "small")).loss_tokens > 0
        await group.stub.CloseRun(pb.CloseRunRequest(run_id="small"))


async def test_a_state_of_three_ranks_goes_on_in_two_and_in_one(
    serve_trainer: Callable[..., Any],
    two_ranks: Ranked,
    three_ranks: Ranked,
    folder: Path,
    tmp_path: Path,
    make_samples: Any,
) -> None:
    """Invariant 9, whatever the number of ranks after the restart."""
    spec = {"base_model": str(folder), "learning_rate": 1e-4, "reference": pb.ReferenceSpec(sync_steps=1)}

    async def go_on(trainer: Any) -> Any:
        assert (await trainer.create("r", **spec)).applied_seq_id == 4
        done = await trainer.forward_backward(5, make_samples(seed=9), loss=LOSS)
        return done.loss, (await trainer.optim_step(6)).grad_norm, done.diagnostics["reference_kl"]

    async with calling(three_ranks) as group:
        await group.create("r", **spec)
        await group.one_step(1, make_samples())
        await group.save(4, "a")
        straight = await go_on(group)
        for states in (two_ranks.state_dir, tmp_path / "states"):
            shutil.copytree(three_ranks.state_dir / "r", states / "r")
    async with calling(two_ranks) as group:
        assert await go_on(group) == pytest.approx(straight, rel=1e-5, abs=1e-9)
    async with serve_trainer() as alone:
        assert await go_on(alone) == pytest.approx(straight, rel=1e-5, abs=1e-9)


def test_no_rank_is_left_without_torchrun(three_ranks: Ranked) -> None:
    """However it dies. The last one that needs them."""
    three_ranks.wait_served()
    pids = [three_ranks.rank_pid(rank) for rank in range(3)]
    three_ranks.process.kill()
    began = time.monotonic()
    while alive(pids):
        time.sleep(0.01)
        assert time.monotonic() - began < END_SECONDS
