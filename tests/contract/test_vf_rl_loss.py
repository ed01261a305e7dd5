"""A file of vf-rl trains by vf-rl's own formula: through the run that it becomes, the loss that the
orchestrator asks for, and the one that the trainer computes; against RLTrainer.compute_loss written in numpy.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quartet.config.load import validate
from quartet.run.config import RunConfig
from quartet.run.vf_rl import translate
from quartet_orchestrator.specs import loss_spec as asked
from quartet_trainer.loss import Tokens, token_losses
from quartet_trainer.wire.loss import loss_spec as understood

LENGTHS = np.array([1, 7, 40, 3, 120, 29])
K = int(LENGTHS.sum())


def numbers(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities of trainer and sampler, many of them further apart than the bounds; advantages."""
    rng = np.random.default_rng(seed)
    logp = rng.uniform(-5, -0.1, K)
    sampled = np.minimum(logp + rng.normal(0, 2.0, K), -0.01)
    advantages = np.repeat(rng.normal(0, 1, len(LENGTHS)), LENGTHS)
    return logp, sampled, advantages


def rl_trainer(
    logp: np.ndarray, sampled: np.ndarray, advantages: np.ndarray, low: float, high: float
) -> tuple[float, np.ndarray]:
    """(loss, its gradient): -ratio * A summed where low <= ratio <= high, over all tokens of the batch."""
    ratio = np.exp(logp - sampled)
    kept = ~((ratio < low) | (ratio > high))
    assert 0.2 < kept.mean() < 0.95, "the bounds act"
    by_token = np.where(kept, -ratio * advantages, 0.0) / len(logp)
    # d ratio / d logp = ratio
    return float(by_token.sum()), by_token


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bounds", [None, (0.5, 2.0)], ids=["defaults", "narrow"])
def test_the_loss_is_that_of_rl_trainer(seed: int, bounds: tuple[float, float] | None) -> None:
    args = {} if bounds is None else {"mask_ratio_low": bounds[0], "mask_ratio_high": bounds[1]}
    given = {"model": "m", "env": {"id": "e"}, "trainer": {"gpus": 1, "args": args}}
    config = validate(RunConfig, translate(given).tables)
    spec = understood(asked(config, batch=3))
    assert spec.proximal_version == 3, "the live policy, in the only step on the batch"
    logp, sampled, advantages = numbers(seed)
    logp_K = torch.tensor(logp, requires_grad=True)
    tokens = Tokens(
        logp_K,
        torch.zeros(K),
        torch.tensor(advantages),
        torch.tensor(LENGTHS),
        torch.tensor(sampled),
        # As the trainer takes a proximal policy that is the live one.
        logp_K.detach(),
    )
    loss = token_losses(spec, tokens).sum() / K
    loss.backward()
    expected, gradient = rl_trainer(logp, sampled, advantages, *(bounds or (0.125, 8.0)))
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-12)
    assert logp_K.grad is not None
    np.testing.assert_allclose(logp_K.grad, gradient, atol=1e-12)
    # By all tokens of the batch, those outside the bounds too.
    assert config.algorithm.normalised_by == "token"
