"""The losses and advantages of verifiers 0.1.3's GRPOTrainer, written in numpy, against what a script's
arguments make of the same rollouts here: quartet.grpo's translation, the orchestrator's credit, normaliser
and LossSpec, and the trainer's loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import quartet.grpo as vf
import torch
from quartet.grpo.translate import translate
from quartet.run.config import RunConfig
from quartet.scripts.models import Model
from quartet.v1.rollout_pb2 import Rollout
from quartet_orchestrator import batches, credit
from quartet_orchestrator.specs import loss_spec
from quartet_trainer.loss import Tokens, token_losses
from quartet_trainer.wire.loss import loss_spec as from_wire

Array = np.ndarray[Any, np.dtype[np.float64]]

rng = np.random.default_rng(7)
G, GROUPS, T, MAX_SEQ_LEN = 4, 3, 11, 29
B = G * GROUPS
LENGTHS = rng.integers(1, T + 1, B)
MASK = (np.arange(T)[None] < LENGTHS[:, None]).astype(float)
LOGP = rng.uniform(-4, -0.1, (B, T))
OLD = LOGP + rng.normal(0, 0.3, (B, T))
REFERENCE = LOGP + rng.normal(0, 0.5, (B, T))
REWARDS = rng.uniform(0, 1, B)
CUT = np.arange(B) % 5 == 1


# As verifiers/trainers/grpo_trainer.py has it: _compute_advantages and compute_loss, on one device.


def advantages_there(rewards: Array, *, scale: bool) -> Array:
    groups = rewards.reshape(-1, G)
    centred = groups - groups.mean(1, keepdims=True)
    if scale:
        centred = centred / (groups.std(1, ddof=1, keepdims=True) + 1e-4)
    return centred.reshape(-1)


def loss_there(args: vf.GRPOConfig, logp: Array, old: Array, advantages: Array, mask: Array) -> float:
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    coef_1 = np.exp(logp - old)
    coef_2 = np.clip(coef_1, 1 - args.epsilon, 1 + high)
    first = coef_1 if args.delta is None else np.minimum(coef_1, args.delta)
    per_token = -np.minimum(first * advantages[:, None], coef_2 * advantages[:, None])
    if args.beta:
        difference = REFERENCE - logp
        per_token = per_token + args.beta * (np.exp(difference) - difference - 1)
    if args.loss_type == "grpo":
        return float(((per_token * mask).sum(-1) / mask.sum(-1).clip(min=1.0)).mean())
    if args.loss_type == "bnpo":
        return float((per_token * mask).sum() / mask.sum().clip(min=1.0))
    return float((per_token * mask).sum() / (per_token.shape[0] * args.max_seq_len))


def gradient_there(args: vf.GRPOConfig, old: Array | None, advantages: Array, mask: Array) -> Array:
    """By central differences. Without `old` the ratio is against the policy itself, held still."""
    step, found = 1e-6, np.zeros_like(LOGP)
    compared = LOGP if old is None else old
    for place in np.ndindex(*LOGP.shape):
        above, below = LOGP.copy(), LOGP.copy()
        above[place] += step
        below[place] -= step
        values = [loss_there(args, one, compared, advantages, mask) for one in (above, below)]
        found[place] = (values[0] - values[1]) / (2 * step)
    return found


# The same here.


def configured(**given: Any) -> tuple[vf.GRPOConfig, RunConfig]:
    batch = {"per_device_train_batch_size": B, "num_generations": G, "max_steps": 5}
    args = vf.GRPOConfig(**batch, max_seq_len=MAX_SEQ_LEN, **given)
    model = Model("m", "/m")
    return args, translate(args, model, [vf.Environment("e")]).config


def rollouts(cut: Array | None = None) -> list[Rollout]:
    made = []
    for index, length in enumerate(LENGTHS):
        one = Rollout(reward=REWARDS[index], truncated=bool(cut is not None and cut[index]))
        one.samples.add(token_ids=range(length + 1), logprobs=[-1.0] * length).spans.add(
            start=1, length=length
        )
        made.append(one)
    return made


def loss_here(config: RunConfig, old: Array | None, cut: Array | None = None) -> tuple[float, Array]:
    """Loss, and its gradient with respect to each log-probability."""
    groups = [rollouts(cut)[start : start + G] for start in range(0, B, G)]
    trained, advantages = batches.credited(config.algorithm, groups)
    kept = [
        index
        for index in range(B)
        if cut is None or not cut[index] or not config.algorithm.overlong_filtering
    ]
    assert len(kept) == len(trained)
    covered = np.concatenate(
        [np.full(LENGTHS[index], index) * T + np.arange(LENGTHS[index]) for index in kept]
    )
    logp = torch.tensor(LOGP.reshape(-1)[covered], requires_grad=True)
    compared = logp.detach() if old is None else torch.tensor(old.reshape(-1)[covered])
    spec = from_wire(loss_spec(config, 3))
    tokens = Tokens(
        logp,
        torch.zeros_like(logp),
        torch.tensor(
            np.concatenate([np.full(LENGTHS[i], a[0]) for i, a in zip(kept, advantages, strict=True)])
        ),
        torch.tensor(LENGTHS[kept]),
        sampled_K=torch.zeros_like(logp),  # that the ratio is not taken against the sampler
        proximal_K=compared,
        reference_K=torch.tensor(REFERENCE.reshape(-1)[covered]),
    )
    losses = token_losses(spec, tokens)
    total = losses.sum() / batches.normalizer(config, trained)
    total.backward()
    gradient = np.zeros(B * T)
    assert logp.grad is not None
    gradient[covered] = logp.grad.numpy()
    return float(total.detach()), gradient.reshape(B, T)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"beta": 0.0},
    {"beta": 0.3},
    {"epsilon": 0.1, "epsilon_high": 0.28},
    {"delta": 1.4, "beta": 0.0},
]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo"])
@pytest.mark.parametrize("given", SETTINGS, ids=str)
@pytest.mark.parametrize("ratio", ["live", "old"])
def test_a_loss_type_is_the_originals(loss_type: str, given: dict[str, Any], ratio: str) -> None:
    args, config = configured(loss_type=loss_type, **given)
    old = None if ratio == "live" else OLD
    advantages = advantages_there(REWARDS, scale=False)
    loss, gradient = loss_here(config, old)
    expected = loss_there(args, LOGP, LOGP if old is None else old, advantages, MASK)
    assert loss == pytest.approx(expected, abs=1e-9)
    np.testing.assert_allclose(gradient, gradient_there(args, old, advantages, MASK), atol=1e-8)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo"])
def test_masked_truncated_completions_keep_their_place_in_the_baseline(loss_type: str) -> None:
    args, config = configured(loss_type=loss_type)
    advantages = advantages_there(REWARDS, scale=False)
    loss, _ = loss_here(config, OLD, CUT)
    expected = loss_there(args, LOGP, OLD, advantages, MASK * ~CUT[:, None])
    # There a completion without tokens counted as a sample of loss 0; here the mean is over those with some.
    share = (~CUT).mean() if loss_type == "grpo" else 1.0
    assert loss * share == pytest.approx(expected, abs=1e-9)
    kept, _ = loss_here(configured(loss_type=loss_type, mask_truncated_completions=False)[1], OLD, CUT)
    assert kept == pytest.approx(loss_there(args, LOGP, OLD, advantages, MASK), abs=1e-9)


def test_dr_grpo_over_micro_batches_is_the_same_number() -> None:
    """There the mean over gradient_accumulation_steps of losses over one device's samples each."""
    args, config = configured(loss_type="dr_grpo", beta=0.0)
    advantages = advantages_there(REWARDS, scale=False)
    halves = [slice(0, B // 2), slice(B // 2, B)]
    parts = [loss_there(args, LOGP[s], OLD[s], advantages[s], MASK[s]) for s in halves]
    assert loss_here(config, OLD)[0] == pytest.approx(np.mean(parts), abs=1e-9)


def test_advantages() -> None:
    rewards = REWARDS.reshape(-1, G).tolist()
    _, config = configured(scale_rewards=False)
    ours = np.concatenate(credit.advantages(config.algorithm.advantage, rewards))
    np.testing.assert_allclose(ours, advantages_there(REWARDS, scale=False), atol=1e-12)
    _, config = configured(scale_rewards=True)
    ours = np.concatenate(credit.advantages(config.algorithm.advantage, rewards))
    # There by the sample standard deviation, here by that of the population: a constant factor.
    factor = np.sqrt(G / (G - 1))
    np.testing.assert_allclose(ours, factor * advantages_there(REWARDS, scale=True), rtol=1e-3)


def test_the_reference_begins_as_the_model_and_follows_the_policy() -> None:
    _, config = configured(beta=0.1, ref_model_sync_steps=7, ref_model_mixup_alpha=0.25)
    reference = config.algorithm.reference
    assert reference is not None and (reference.model, reference.address) == (None, None)
    assert (reference.sync_steps, reference.mixup_alpha) == (7, 0.25)
    _, config = configured(beta=0.0)
    assert config.algorithm.reference is None and not config.algorithm.needs_reference
