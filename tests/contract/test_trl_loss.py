"""The loss of TRL's GRPOTrainer 1.16, computed by its own code, against what a script's arguments make of the
same tokens here: quartet.trl's translation, the orchestrator's normaliser and LossSpec, the trainer's loss.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from quartet.run.config import RunConfig
from quartet.scripts.models import Model
from quartet.trl import GRPOConfig
from quartet.trl.loss import AGGREGATIONS
from quartet.trl.translate import Data, translate
from quartet.v1.rollout_pb2 import Rollout
from quartet_orchestrator import batches, credit
from quartet_orchestrator.specs import loss_spec
from quartet_trainer.batch import highest
from quartet_trainer.loss import Tokens, token_losses
from quartet_trainer.wire.loss import loss_spec as from_wire
from torch import Tensor

trl = pytest.importorskip("trl", reason="TRL is a development dependency")
# Importing it takes most of that.
pytestmark = pytest.mark.slow

Array = np.ndarray[Any, np.dtype[np.float64]]

rng = np.random.default_rng(11)
G, GROUPS, T, LONGEST = 4, 3, 9, 13
B = G * GROUPS
LENGTHS = rng.integers(1, T + 1, B)
MASK = (np.arange(T)[None] < LENGTHS[:, None]).astype(float)
LOGP = rng.uniform(-4, -0.1, (B, T))
OLD = LOGP + rng.normal(0, 0.3, (B, T))
SAMPLED = OLD + rng.normal(0, 0.2, (B, T))
REFERENCE = LOGP + rng.normal(0, 0.5, (B, T))
ENTROPY = rng.uniform(0, 2, (B, T))
REWARDS = rng.uniform(0, 1, B)
CUT = np.arange(B) % 5 == 1
# A number of each loss, and the gradients by log-probabilities and entropies.
Found = tuple[float, Array, Array]


def there(given: dict[str, Any], advantages: Array, *, old: Array | None, parts: int = 1) -> Found:
    """By GRPOTrainer._compute_loss, on micro-batches of equally many completions, whose losses add up."""
    args = trl.GRPOConfig(
        "unused",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=B // parts,
        gradient_accumulation_steps=parts,
        num_generations=G,
        max_completion_length=LONGEST,
        **given,
    )
    trainer: Any = object.__new__(trl.GRPOTrainer)
    trainer.args = args
    trainer.model = SimpleNamespace(training=True)
    trainer.accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda value: value,
        reduce=lambda value, reduction: value,
        pad_across_processes=lambda value, dim, pad_index: value,
    )
    trainer.current_gradient_accumulation_steps = parts
    trainer._metrics = {"train": defaultdict(list)}
    trainer.aux_loss_enabled = False
    trainer._entropy_bonus_enabled = args.entropy_coef != 0
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    for name in (
        *("top_entropy_quantile", "off_policy_mask_threshold", "importance_sampling_level", "beta"),
        *("loss_type", "use_vllm", "vllm_importance_sampling_correction", "entropy_coef"),
        *("use_adaptive_entropy", "max_completion_length"),
    ):
        setattr(trainer, name, getattr(args, name))
    logp, entropy = (torch.tensor(one, requires_grad=True) for one in (LOGP, ENTROPY))
    total = torch.zeros((), dtype=torch.float64)
    for part in np.split(np.arange(B), parts):
        trainer._get_per_token_logps_and_entropies = lambda *_, part=part, **__: (
            logp[part],
            entropy[part],
            None,
        )
        inputs = {
            "prompt_ids": torch.ones(len(part), 1),
            "prompt_mask": torch.ones(len(part), 1),
            "completion_ids": torch.ones(len(part), T),
            "completion_mask": torch.tensor(MASK[part]),
            "advantages": torch.tensor(advantages[part]),
            "num_items_in_batch": torch.tensor(MASK.sum()),
            "ref_per_token_logps": torch.tensor(REFERENCE[part]),
        }
        if old is not None:
            inputs["old_per_token_logps"] = torch.tensor(old[part])
        if args.use_vllm:
            inputs["sampling_per_token_logps"] = torch.tensor(SAMPLED[part])
            inputs["importance_sampling_ratio"] = _correction(args, OLD[part], SAMPLED[part], MASK[part])
        # Numbers of the arguments become tensors there, of the type that is the default.
        torch.set_default_dtype(torch.float64)
        try:
            total = total + trainer._compute_loss(None, inputs)
        finally:
            torch.set_default_dtype(torch.float32)
    total.backward()
    return _found(total, logp, entropy)


def _correction(args: Any, old: Array, sampled: Array, mask: Array) -> Tensor:
    """As _generate_and_score_completions makes it."""
    difference = torch.tensor((old - sampled) * mask)
    whole = args.vllm_importance_sampling_mode.startswith("sequence")
    ratio = (difference.sum(-1, keepdim=True) if whole else difference).exp()
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if args.vllm_importance_sampling_mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    outside |= False if low is None else ratio < low
    outside |= False if high is None else ratio > high
    return ratio.masked_fill(outside, 0.0)


def _found(total: Tensor, logp: Tensor, entropy: Tensor) -> Found:
    zero = np.zeros((B, T))
    by_entropy = zero if entropy.grad is None else entropy.grad.numpy() * MASK
    return float(total.detach()), (zero if logp.grad is None else logp.grad.numpy() * MASK), by_entropy


def configured(**given: Any) -> RunConfig:
    args = GRPOConfig(
        per_device_train_batch_size=B,
        num_generations=G,
        max_steps=5,
        max_completion_length=LONGEST,
        **given,
    )
    return translate(args, Model("m", "/m"), Data(100, 0, "unix:/s")).config


def groups(cut: Array | None = None) -> list[list[Rollout]]:
    made = []
    for index, length in enumerate(LENGTHS):
        one = Rollout(reward=REWARDS[index], truncated=bool(cut is not None and cut[index]))
        one.samples.add(token_ids=range(length + 1), logprobs=[-1.0] * length).spans.add(
            start=1, length=length
        )
        made.append(one)
    return [made[start : start + G] for start in range(0, B, G)]


def here(config: RunConfig, *, old: Array | None, sampled: Array, cut: Array | None = None) -> Found:
    trained, credited = batches.credited(config.algorithm, groups(cut))
    filtered = cut is not None and config.algorithm.overlong_filtering
    kept = [index for index in range(B) if not (filtered and cut is not None and cut[index])]
    places = np.concatenate([index * T + np.arange(LENGTHS[index]) for index in kept])
    logp, entropy = (torch.tensor(one, requires_grad=True) for one in (LOGP, ENTROPY))
    spec = from_wire(loss_spec(config, 3))
    of = {name: torch.tensor(one.reshape(-1)[places]) for name, one in (("s", sampled), ("r", REFERENCE))}
    top = None
    if spec.top_entropy_quantile is not None:
        top = torch.tensor(highest([ENTROPY.reshape(-1)[places]], spec.top_entropy_quantile)[0])
    now = logp.reshape(-1)[places]
    proximal = now.detach() if old is None else torch.tensor(old.reshape(-1)[places])
    tokens = Tokens(
        now,
        entropy.reshape(-1)[places],
        torch.tensor(np.repeat([one[0] for one in credited], LENGTHS[kept])),
        torch.tensor(LENGTHS[kept]),
        sampled_K=of["s"],
        proximal_K=proximal if config.algorithm.proximal else None,
        reference_K=of["r"] if config.algorithm.kl_coef else None,
        top_entropy_K=top,
    )
    total = token_losses(spec, tokens).sum() / batches.normalizer(config, trained)
    total.backward()
    return _found(total, logp, entropy)


def advantages_of(config: RunConfig) -> Array:
    _, credited = batches.credited(config.algorithm, groups())
    return np.array([one[0] for one in credited])


def same(ours: Found, theirs: Found) -> None:
    assert ours[0] == pytest.approx(theirs[0], abs=1e-9)
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-9)
    np.testing.assert_allclose(ours[2], theirs[2], atol=1e-9)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"beta": 0.3},
    {"beta": 0.3, "use_bias_correction_kl": False},
    {"epsilon": 0.1, "epsilon_high": 0.28},
    {"delta": 1.4},
    {"off_policy_mask_threshold": 0.02},
    {"top_entropy_quantile": 0.3, "beta": 0.1},
    {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 1.3},
    {"vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5},
]


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
@pytest.mark.parametrize("given", SETTINGS, ids=str)
@pytest.mark.parametrize("ratio", ["live", "old"])
def test_a_loss_type_is_the_originals(loss_type: str, given: dict[str, Any], ratio: str) -> None:
    asked = {"loss_type": loss_type, **given}
    config, old = configured(**asked), None if ratio == "live" else OLD
    # Without vLLM it is the same model that samples, and nothing but the mask looks at its numbers.
    masks = "off_policy_mask_threshold" in given
    sampled = SAMPLED if not masks else LOGP if old is None else old
    same(here(config, old=old, sampled=sampled), there(asked, advantages_of(config), old=old))


@pytest.mark.parametrize("loss_type", [name for name in AGGREGATIONS if name != "vespo"])
@pytest.mark.parametrize("given", [{}, {"delta": 1.4}, {"off_policy_mask_threshold": 0.02}], ids=str)
def test_of_whole_completions_too(loss_type: str, given: dict[str, Any]) -> None:
    asked = {"loss_type": loss_type, "importance_sampling_level": "sequence", **given}
    config = configured(**asked)
    same(here(config, old=OLD, sampled=OLD), there(asked, advantages_of(config), old=OLD))


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize(("low", "high"), [(None, 1.2), (0.8, 1.2), (0.8, None)])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "grpo"])
def test_what_vllm_samples_is_weighed_as_there(
    mode: str, low: float | None, high: float | None, loss_type: str
) -> None:
    asked = {
        "loss_type": loss_type,
        "use_vllm": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
        "beta": 0.1,
        "off_policy_mask_threshold": 0.02,
    }
    if low is not None and mode.endswith("truncate"):
        with pytest.raises(Exception, match="weights are cut from above alone"):
            configured(**asked)
        return
    config = configured(**asked)
    same(here(config, old=OLD, sampled=SAMPLED), there(asked, advantages_of(config), old=OLD))


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo", "bnpo"])
def test_the_entropy_of_a_loss_over_tokens(loss_type: str) -> None:
    asked = {"loss_type": loss_type, "entropy_coef": 0.05}
    config = configured(**asked)
    ours = here(config, old=OLD, sampled=OLD)
    same(ours, there(asked, advantages_of(config), old=OLD))
    assert np.abs(ours[2]).max() > 0


@pytest.mark.parametrize("loss_type", [name for name in AGGREGATIONS if name != "bnpo"])
def test_micro_batches_add_up_to_the_same_number(loss_type: str) -> None:
    asked = {"loss_type": loss_type, "beta": 0.1}
    config = configured(**asked)
    same(here(config, old=OLD, sampled=OLD), there(asked, advantages_of(config), old=OLD, parts=2))


def test_vespo_of_vllm_has_the_ratio_to_the_sampler() -> None:
    """Where the bounds of tokens do nothing."""
    asked = {
        "loss_type": "vespo",
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1e6,
    }
    config = configured(**asked)
    same(here(config, old=OLD, sampled=SAMPLED), there(asked, advantages_of(config), old=OLD))


def test_completions_that_are_cut_keep_their_place_in_the_baseline() -> None:
    config = configured(mask_truncated_completions=True)
    ours = here(config, old=OLD, sampled=OLD, cut=CUT)
    weight = MASK * ~CUT[:, None]
    ratio = np.exp(LOGP - OLD)
    advantages = advantages_of(config)[:, None]
    losses = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    assert ours[0] == pytest.approx((losses * weight).sum() / weight.sum())


def test_advantages() -> None:
    from trl.trainer.utils import nanstd

    rewards = torch.tensor(REWARDS).view(-1, G)
    centred = rewards - rewards.mean(1, keepdim=True)
    none, group = (
        torch.tensor(
            credit.advantages(configured(scale_rewards=scale).algorithm.advantage, rewards.tolist()),
            dtype=torch.float64,
        )
        for scale in ("none", "group")
    )
    torch.testing.assert_close(none, centred)
    # There by the deviation of a sample, here by that of the population: a constant factor, but for 1e-4.
    scaled = centred / (nanstd(rewards, dim=1)[:, None] + 1e-4)
    torch.testing.assert_close(group, scaled * (G / (G - 1)) ** 0.5, rtol=1e-3, atol=0)


def test_advantages_of_rewards_that_are_normalised_apart() -> None:
    """As _generate_and_score_completions has it."""
    from trl.trainer.utils import nanstd

    algorithm = configured(multi_objective_aggregation="normalize_then_sum").algorithm
    said = torch.tensor(np.stack([REWARDS, np.square(REWARDS) * 50.0], -1)).view(-1, G, 2)
    apart = (said - said.nanmean(1, keepdim=True)) / (nanstd(said, dim=1, keepdim=True) + 1e-4)
    summed = apart.view(-1, 2).nansum(1)
    theirs = (summed - summed.mean()) / (nanstd(summed) + 1e-4)
    groups = [[rewarded(a=float(a), b=float(b)) for a, b in group] for group in said]
    found = credit.gdpo(groups, algorithm.reward_weights)
    ours = torch.tensor([one for group in found for one in group], dtype=torch.float64)
    # There by the deviation of a sample, here by that of the population: a constant factor, but for 1e-4.
    torch.testing.assert_close(ours, theirs * (B / (B - 1)) ** 0.5, rtol=2e-3, atol=0)


def rewarded(**rewards: float) -> credit.Member:
    return credit.Member(sum(rewards.values()), rewards, {}, 1, 1, False, "stop", 0, "")
