"""A file of prime-rl trains by prime-rl's own formula: through the run that it becomes, the rollouts that the
orchestrator leaves out, the loss that it asks for, and the one that the trainer computes; against prime-rl's
loss written in numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from quartet.config.load import validate
from quartet.run.algorithm import SHIPPED_LOSSES
from quartet.run.config import RunConfig
from quartet.run.prime_rl import translate
from quartet.v1.rollout_pb2 import Rollout, Sample
from quartet_orchestrator import batches
from quartet_orchestrator.specs import loss_spec as asked
from quartet_trainer.loss import Tokens, token_losses
from quartet_trainer.loss.custom import load_losses
from quartet_trainer.spec import LossSpec
from quartet_trainer.wire.loss import loss_spec as understood

#: Tokens of the rollouts of two groups, and what these earned: those of the second teach nothing.
LENGTHS = np.array([3, 40, 7, 29])
REWARDS = np.array([0.0, 1.0, 0.5, 0.5])
LEARNT = int(LENGTHS[:2].sum())


def run_of(**loss: Any) -> RunConfig:
    file = {
        "max_steps": 3,
        "model": {"name": "m"},
        "trainer": {"loss": loss},
        "orchestrator": {"group_size": 2, "batch_size": 4, "train": {"source": [{"taskset": {"id": "e"}}]}},
    }
    return validate(RunConfig, translate(file).tables)


def numbers(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of trainer and sampler, many of them further apart than the bounds."""
    rng = np.random.default_rng(seed)
    logp = rng.uniform(-3, -0.05, LEARNT)
    return logp, np.minimum(logp + rng.normal(0, 1.5, LEARNT), -0.01)


def prime_rl(
    logp: np.ndarray, sampled: np.ndarray, advantages: np.ndarray, loss: dict[str, Any]
) -> tuple[float, np.ndarray]:
    """(loss, its gradient) over all tokens of the rollouts that it is given."""
    ratio, moved = np.exp(logp - sampled), np.exp(logp) - np.exp(sampled)
    if loss.get("type") == "ipo":
        out = np.abs(moved) > loss.get("ipo_threshold", 0.1)
    else:
        above, below = moved > loss.get("dppo_mask_high", 0.2), moved < -loss.get("dppo_mask_low", 0.2)
        out = np.where(advantages > 0, above, below)
    assert 0.05 < out.mean() < 0.8, "the bounds act"
    kl_tau, adv_tau = loss.get("kl_tau", 1e-3), loss.get("adv_tau", 1.0)
    gained = ~out * adv_tau * advantages * ratio
    value = (-gained + kl_tau * (logp - sampled) ** 2).sum() / len(logp)
    return float(value), (-gained + 2 * kl_tau * (logp - sampled)) / len(logp)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"kl_tau": 0.0, "dppo_mask_high": 0.28},
        {"kl_tau": 0.5, "adv_tau": 0.3, "dppo_mask_low": 0.05},
        {"type": "ipo"},
    ],
    ids=["defaults", "dppo", "taus", "ipo"],
)
def test_the_loss_is_that_of_prime_rl(seed: int, loss: dict[str, Any]) -> None:
    config = run_of(**loss)
    rollouts, advantages = batches.credited(config.algorithm, groups())
    assert [len(one.samples[0].logprobs) for one in rollouts] == [3, 40], "the others have no advantage"
    assert batches.normalizer(config, rollouts) == LEARNT, "and are not in the number that divides"
    advantages_K = np.repeat([one for (one,) in advantages], LENGTHS[:2])
    logp, sampled = numbers(seed)
    value, gradient = computed(understood(asked(config, batch=3)), config, logp, sampled, advantages_K)
    expected, slope = prime_rl(logp, sampled, advantages_K, loss)
    assert value == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(gradient, slope, atol=1e-12)


def groups() -> list[list[Rollout]]:
    made = [
        Rollout(reward=reward, samples=[Sample(token_ids=[1] * length, logprobs=[-1.0] * length)])
        for reward, length in zip(REWARDS, LENGTHS, strict=True)
    ]
    return [made[:2], made[2:]]


def computed(
    spec: LossSpec, config: RunConfig, logp: np.ndarray, sampled: np.ndarray, advantages_K: np.ndarray
) -> tuple[float, np.ndarray]:
    """By the trainer, with the losses that the file's run gives it."""
    logp_K = torch.tensor(logp, requires_grad=True)
    tokens = Tokens(
        logp_K,
        torch.zeros(LEARNT),
        torch.tensor(advantages_K),
        torch.tensor(LENGTHS[:2]),
        torch.tensor(sampled),
    )
    losses = load_losses({})
    if spec.custom:
        assert not losses[spec.custom].refuses(spec.custom_args)
    loss = token_losses(spec, tokens, custom=losses).sum() / LEARNT
    loss.backward()
    assert logp_K.grad is not None
    return float(loss.detach()), logp_K.grad.numpy()


def test_every_trainer_has_the_losses_that_a_run_may_name() -> None:
    assert set(load_losses({})) == set(SHIPPED_LOSSES)
    own = load_losses({"prime_rl_ipo": "quartet_trainer.loss.prime_rl:dppo"})
    assert own["prime_rl_ipo"].function == own["prime_rl_dppo"].function, "what an operator names goes first"


def test_nothing_is_left_out_where_the_file_says_so() -> None:
    """And a batch without any advantage is not empty: it is trained on, to nothing."""
    config = run_of()
    assert len(batches.credited(config.algorithm, groups()[1:])[0]) == 2
    kept = config.algorithm.model_copy(update={"zero_advantage_filtering": False})
    assert len(batches.credited(kept, groups())[0]) == 4
