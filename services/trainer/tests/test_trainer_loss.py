"""Every loss against the same formula written in numpy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quartet_trainer.loss import diagnostics, token_losses
from quartet_trainer.spec import LossSpec, Ratio

rng = np.random.default_rng(3)
K = 500
LOGP = rng.uniform(-5, -0.1, K)
SAMPLED = LOGP + rng.normal(0, 0.8, K)
ADVANTAGE = rng.normal(0, 1, K)
RATIO = np.exp(LOGP - SAMPLED)


def expected(spec: LossSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(loss, d loss / d log p, clipped) per token."""
    if spec.ratio is Ratio.CISPO:
        cap = 4.0 if spec.clip_high is None else spec.clip_high
        weight = np.minimum(RATIO, cap)
        return -weight * ADVANTAGE * LOGP, -weight * ADVANTAGE, cap < RATIO
    if spec.ratio is Ratio.PPO:
        low = 0.2 if spec.clip_low is None else spec.clip_low
        high = 0.2 if spec.clip_high is None else spec.clip_high
        free = RATIO * ADVANTAGE
        bound = np.where(1 + high < RATIO, 1 + high, np.where(1 - low > RATIO, 1 - low, RATIO)) * ADVANTAGE
        clipped = bound < free
        return -np.where(clipped, bound, free), np.where(clipped, 0.0, -free), clipped
    return -ADVANTAGE * LOGP, -ADVANTAGE, np.zeros(K, bool)


@pytest.mark.parametrize(
    "spec",
    [
        LossSpec(ratio=Ratio.CISPO),
        LossSpec(ratio=Ratio.CISPO, clip_high=1.1),
        LossSpec(ratio=Ratio.PPO),
        LossSpec(ratio=Ratio.PPO, clip_low=0.1, clip_high=0.28),
        LossSpec(ratio=Ratio.NONE),
        LossSpec(ratio=Ratio.CROSS_ENTROPY),
    ],
    ids=str,
)
def test_loss_and_gradient_equal_the_formula(spec: LossSpec) -> None:
    logp = torch.tensor(LOGP, requires_grad=True)
    sampled, advantage = torch.tensor(SAMPLED), torch.tensor(ADVANTAGE)
    losses = token_losses(spec, logp, sampled, advantage)
    losses.sum().backward()
    loss, gradient, clipped = expected(spec)
    np.testing.assert_allclose(losses.detach(), loss, atol=1e-6)
    np.testing.assert_allclose(logp.grad, gradient, atol=1e-6)
    values = diagnostics(spec, logp.detach(), sampled, advantage, torch.zeros(K))
    assert values["clipped_fraction"] == pytest.approx(clipped.mean(), abs=1e-9)
    assert values["ratio_max"] == pytest.approx(RATIO.max(), rel=1e-6)
    assert values["ratio_mean"] == pytest.approx(RATIO.mean(), rel=1e-6)
    assert values["mismatch_kl"] == pytest.approx((RATIO - 1 - np.log(RATIO)).mean(), rel=1e-6)
    assert values["logprob_difference_max"] == pytest.approx(np.abs(LOGP - SAMPLED).max(), rel=1e-6)


def test_mismatch_kl_keeps_small_differences() -> None:
    sampled = torch.full((8,), -2.0)
    values = diagnostics(LossSpec(ratio=Ratio.CISPO), sampled + 1e-4, sampled, torch.ones(8), torch.zeros(8))
    assert values["mismatch_kl"] == pytest.approx(5e-9, rel=0.01)


def test_a_vanished_probability_does_not_make_the_batch_infinite() -> None:
    logp = torch.tensor([-1.0], requires_grad=True)
    loss = token_losses(LossSpec(ratio=Ratio.PPO), logp, torch.tensor([-500.0]), torch.tensor([-1.0])).sum()
    assert torch.isfinite(loss)
