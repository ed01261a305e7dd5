"""Tokens of the highest entropy, and a coefficient that keeps the entropy up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.batch import highest
from quartet_trainer.coefficients import KL, Coefficients
from quartet_trainer.entropy_control import EntropyControl
from quartet_trainer.kl_control import KlControl
from quartet_trainer.model import load_model
from quartet_trainer.spec import LossSpec


def loss(**fields: Any) -> pb.LossSpec:
    return pb.LossSpec(
        kind=pb.LOSS_KIND_POLICY_GRADIENT, ratio=pb.RATIO_TREATMENT_NONE, temperature=0.7, **fields
    )


# -- which tokens are learned from


def test_the_share_is_of_all_samples_together() -> None:
    values = [np.array([1.0, 9.0], np.float32), np.array([], np.float32), np.array([3.0, 2.0], np.float32)]
    assert [chosen.tolist() for chosen in highest(values, 0.5)] == [[False, True], [], [True, False]]
    assert [chosen.tolist() for chosen in highest(values, 0.01)] == [[False, True], [], [False, False]]
    alike = [np.ones(3, np.float32)]
    assert highest(alike, 0.1)[0].all(), "none of them is lower than another"


def test_where_one_is_no_number_the_loss_is_none() -> None:
    """run.py 5: so the step is skipped, and not taken on what is left."""
    chosen = highest([np.array([1.0, math.nan], np.float32), np.array([2.0], np.float32)], 0.3)
    assert all(one.all() for one in chosen)


@pytest.mark.parametrize("budget", [40, 10_000])
async def test_the_loss_is_of_the_batchs_most_uncertain_tokens_whatever_the_packing(
    folder: Path, serve_trainer: Any, make_samples: Any, budget: int
) -> None:
    samples, share = make_samples(), 0.2
    model = load_model(folder, "m", device=torch.device("cpu")).eval()
    logp, entropy, advantage = [], [], []
    for one in samples:
        ids, start = torch.tensor([list(one.sample.token_ids)]), one.sample.spans[0].start
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids).logits[0, start - 1 : -1].double() / 0.7, -1)
        entropy += (-(log_p.exp() * log_p).sum(-1)).tolist()
        logp += log_p.gather(1, ids[0, start:, None])[:, 0].tolist()
        advantage += [one.advantages[0]] * len(log_p)
    kept = np.array(entropy) >= np.quantile(entropy, 1 - share)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), microbatch_tokens=budget)
        done = await trainer.forward_backward(1, samples, loss=loss(top_entropy_quantile=share))
        assert (await trainer.optim_step(2)).grad_norm > 0
    expected = -np.sum(kept * np.array(advantage) * np.array(logp)) / len(kept)
    assert done.loss == pytest.approx(expected, rel=1e-5) and done.loss_tokens == len(kept)
    told = done.diagnostics
    assert told["top_entropy_fraction"] == pytest.approx(kept.mean()) and kept.mean() < 2 * share
    assert told["top_entropy_threshold"] == pytest.approx(np.array(entropy)[kept].min(), rel=1e-5)


# -- the adaptive coefficient


def test_the_coefficient_follows_the_formula() -> None:
    control = EntropyControl()
    spec = LossSpec(entropy_coef=0.01, target_entropy=1.0, entropy_coef_delta=0.1)
    assert control.of(spec) == 0.0, "nothing was measured yet"
    control.observe(spec, 2.0, 10)
    control.observe(spec, 0.0, 30)
    control.step(taken=True)
    assert control.of(spec) == pytest.approx(0.11), "0.5 over all tokens since the step before"
    control.observe(spec, 1.0, 10)
    control.step(taken=True)
    assert control.of(spec) == pytest.approx(0.21), "at most the target is low, too"
    control.observe(spec, 1.1, 10)
    control.step(taken=True)
    assert control.of(spec) == 0.0, "it does not act where the entropy is high"
    assert control.coefficient == pytest.approx(0.11)
    for taken, mean in ((False, 0.5), (True, math.inf), (True, math.nan)):
        control.observe(spec, mean, 10)
        control.step(taken=taken)
        assert control.coefficient == pytest.approx(0.11), "a step without a measurement changes nothing"
    assert control.of(LossSpec(entropy_coef=-0.2)) == -0.2, "which is fixed"


def test_the_entropy_of_a_step_is_the_mean_over_all_of_its_tokens() -> None:
    """entropy_control.py 1 and 2: batches count by their tokens, and none of the first step is acted on."""
    control, spec = EntropyControl(), LossSpec(entropy_coef=0.01, target_entropy=1.0, entropy_coef_delta=0.1)
    for means, low in (((2.0, 0.9), False), ((0.1, 1.1), True), ((1.1, 0.1), True), ((0.9, 2.0), False)):
        acts = control.of(spec)
        assert acts in (0.0, control.coefficient)
        for mean, tokens in zip(means, (10, 30), strict=True):
            control.observe(spec, mean, tokens)
            assert control.of(spec) == acts, "the step before says whether it acts, to its end"
        control.step(taken=True)
        mean = (10 * means[0] + 30 * means[1]) / 40
        assert (control.of(spec) > 0, low) == (mean <= 1.0, mean <= 1.0), means


def test_losses_without_a_target_are_not_measured() -> None:
    """entropy_control.py 3 and 4: it begins at the coefficient of the first loss that has one."""
    control, fixed = EntropyControl(), LossSpec(entropy_coef=0.5)
    control.observe(fixed, 0.0, 100)
    control.step(taken=True)
    assert control == EntropyControl()
    control.observe(LossSpec(entropy_coef=0.2, target_entropy=1.0, entropy_coef_delta=0.1), 2.0, 1)
    control.observe(fixed, 0.0, 100)
    control.step(taken=True)
    assert control.coefficient == pytest.approx(0.1) and not control.is_low


def test_the_coefficient_keeps_within_its_bounds() -> None:
    control = EntropyControl()
    spec = LossSpec(target_entropy=1.0, entropy_coef_delta=0.7)
    found = []
    for mean in (0.5, 0.5, 2.0, 2.0, 0.5):
        control.observe(spec, mean, 1)
        control.step(taken=True)
        found.append(control.coefficient)
    assert found == pytest.approx([0.7, 1.0, 0.3, 0.0, 0.7])
    usual = EntropyControl()
    usual.observe(LossSpec(target_entropy=1.0), 0.5, 1)
    usual.step(taken=True)
    assert usual.coefficient == 0.005


def test_a_state_of_an_earlier_release_has_no_coefficient_of_the_entropy() -> None:
    before, after = Coefficients(), Coefficients()
    spec = LossSpec(target_entropy=1.0, entropy_coef=0.3)
    for one in (before, after):
        one.observe(spec, {"entropy": 0.5}, 4)
        one.step(taken=True)
    before.restore({KL: KlControl().meta()})
    assert before.meta() == Coefficients().meta() and before.adapted(spec).entropy_coef == 0.0
    before.restore(after.meta())
    assert before.adapted(spec) == after.adapted(spec) and after.adapted(spec).entropy_coef == 0.305


async def test_samples_without_advantage_learn_only_while_the_coefficient_acts(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    samples = make_samples()
    for one in samples:
        one.advantages[:] = [0.0]
    low = loss(target_entropy=100.0)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        norms, told = [], []
        for seq_id, spec in ((1, low), (3, low), (5, loss(target_entropy=1e-3)), (7, low)):
            told.append((await trainer.forward_backward(seq_id, samples, loss=spec)).diagnostics)
            norms.append((await trainer.optim_step(seq_id + 1)).grad_norm)
    # As measured: nothing yet, low, low, high by the third step's target.
    assert [values["entropy_coef"] for values in told] == pytest.approx([0.0, 0.005, 0.01, 0.0])
    assert [norm > 0 for norm in norms] == [False, True, True, False]
