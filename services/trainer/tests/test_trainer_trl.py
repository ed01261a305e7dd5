"""The losses that TRL has, with gradients, against GRPOTrainer._compute_loss itself, on the same tensors.

TRL computes padded rows [B, T], we compute covered tokens [K]; ours are divided by what TRL divides by.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from quartet_trainer.batch import highest
from quartet_trainer.loss import Tokens, diagnostics, token_losses
from quartet_trainer.spec import Aggregation, Correction, CorrectionMode, LossSpec, Ratio, RatioLevel

pytest.importorskip("trl", reason="TRL is a development dependency")
# Importing it takes most of that.
pytestmark = pytest.mark.slow

LENGTHS = torch.tensor([5, 1, 9, 3, 7, 9])
B, T = len(LENGTHS), 9
MASK = (torch.arange(T)[None] < LENGTHS[:, None]).int()


def columns(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(B, T, generator=generator, dtype=torch.float64)

    logp = -0.2 - torch.rand(B, T, generator=generator, dtype=torch.float64) * 4
    return {
        "logp": logp,
        "old": logp + noise(0.4),
        "sampled": logp + noise(0.6),
        "reference": logp + noise(0.5),
        "advantages": torch.randn(B, generator=generator, dtype=torch.float64),
        "entropy": torch.rand(B, T, generator=generator, dtype=torch.float64),
    }


class Accelerator:
    """What _compute_loss asks of one process."""

    num_processes, sync_gradients = 1, True
    gather = gather_for_metrics = staticmethod(lambda x: x)

    @staticmethod
    def reduce(x: torch.Tensor, reduction: str) -> torch.Tensor:
        return x

    @staticmethod
    def pad_across_processes(x: torch.Tensor, dim: int, pad_index: float) -> torch.Tensor:
        return x


def of_trl(
    given: dict[str, torch.Tensor], **settings: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(loss, its gradient, metrics) by TRL."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    logp = given["logp"].clone().requires_grad_()
    values = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "delta": None,
        "is_ratio": None,
        "entropy_coef": 0.0,
        "weighted_kl": False,
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
    } | settings
    args = SimpleNamespace(
        delta=values["delta"],
        use_bias_correction_kl=values["weighted_kl"],
        steps_per_generation=1,
        entropy_target=None,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    )
    trainer = SimpleNamespace(
        **{
            key: values[key]
            for key in ("loss_type", "importance_sampling_level", "beta", "epsilon_low", "epsilon_high")
        },
        args=args,
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, given["entropy"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=values["top_entropy_quantile"],
        get_high_entropy_mask=partial(
            GRPOTrainer.get_high_entropy_mask, SimpleNamespace(accelerator=Accelerator())
        ),
        off_policy_mask_threshold=values["off_policy_mask_threshold"],
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        use_vllm=values["is_ratio"] is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=T,
        accelerator=Accelerator(),
        _entropy_bonus_enabled=values["entropy_coef"] != 0,
        use_adaptive_entropy=False,
        entropy_coef=values["entropy_coef"],
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": ids,
        "completion_mask": MASK,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["reference"],
        "importance_sampling_ratio": values["is_ratio"],
        "num_items_in_batch": MASK.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.detach(), logp.grad, trainer._metrics["train"]


def of_quartet(
    spec: LossSpec, given: dict[str, torch.Tensor], normalizer: float
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    flat = {key: value[MASK.bool()] for key, value in given.items() if value.ndim == 2}
    logp = flat["logp"].clone().requires_grad_()
    proximal = spec.proximal_version is not None
    rest = (
        given["advantages"].repeat_interleave(LENGTHS),
        LENGTHS,
        flat["sampled"] if proximal else flat["old"],
        flat["old"] if proximal else None,
        flat["reference"],
        None if spec.top_entropy_quantile is None else _highest(flat["entropy"], spec.top_entropy_quantile),
    )
    loss = token_losses(spec, Tokens(logp, flat["entropy"], *rest)).sum() / normalizer
    loss.backward()
    padded = torch.zeros(B, T, dtype=torch.float64)
    padded[MASK.bool()] = logp.grad
    return loss.detach(), padded, diagnostics(spec, Tokens(logp.detach(), flat["entropy"], *rest))


def _highest(entropy_K: torch.Tensor, share: float) -> torch.Tensor:
    of_samples = [part.numpy() for part in entropy_K.split(LENGTHS.tolist())]
    return torch.from_numpy(np.concatenate(highest(of_samples, share)))


N = float(MASK.sum())
PPO, SEQUENCE = {"ratio": Ratio.PPO}, {"aggregation": Aggregation.SEQUENCE}
GSPO = {"ratio_level": RatioLevel.SEQUENCE, "clip_low": 3e-2, "clip_high": 4e-2}
OF_SAMPLES = {"importance_sampling_level": "sequence", "epsilon_low": 3e-2, "epsilon_high": 4e-2}
PAIRS = {
    "grpo": ({"beta": 0.04}, LossSpec(**PPO, **SEQUENCE, kl_coef=0.04), B),
    "grpo, two-sided": ({"delta": 1.5}, LossSpec(**PPO, **SEQUENCE, delta=1.5), B),
    "dr_grpo": ({"loss_type": "dr_grpo"}, LossSpec(**PPO), B * T),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, LossSpec(**PPO, clip_high=0.28), N),
    "bnpo": ({"loss_type": "bnpo"}, LossSpec(**PPO), N),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, LossSpec(clip_high=1.2), N),
    "gspo": (OF_SAMPLES, LossSpec(**PPO, **SEQUENCE, **GSPO), B),
    "sapo": ({"loss_type": "sapo"}, LossSpec(ratio=Ratio.SAPO, **SEQUENCE), B),
    "luspo": ({"loss_type": "luspo", **OF_SAMPLES}, LossSpec(**PPO, **GSPO), B),
    "vespo": ({"loss_type": "vespo"}, LossSpec(ratio=Ratio.VESPO), N),
    "weighted": (
        {"beta": 0.3, "weighted_kl": True}, LossSpec(**PPO, **SEQUENCE, kl_coef=0.3, kl_weighted=True), B
    ),
    "off-policy mask": (
        {"off_policy_mask_threshold": 0.05}, LossSpec(**PPO, **SEQUENCE, off_policy_mask=0.05), B
    ),
    "top entropy": (
        {"top_entropy_quantile": 0.3, "beta": 0.1},
        LossSpec(**PPO, **SEQUENCE, top_entropy_quantile=0.3, kl_coef=0.1), B
    ),
    "entropy": ({"loss_type": "dapo", "entropy_coef": 0.3}, LossSpec(**PPO, entropy_coef=0.3), N),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_loss_and_gradient_equal_trl(name: str) -> None:
    settings, spec, normalizer = PAIRS[name]
    given = columns()
    theirs, their_gradient, metrics = of_trl(given, **settings)
    ours, our_gradient, values = of_quartet(spec, given, normalizer)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    torch.testing.assert_close(our_gradient, their_gradient, atol=1e-6, rtol=0)
    assert values["entropy"] == pytest.approx(metrics["entropy"][0], abs=1e-6)
    if spec.ratio is Ratio.PPO and spec.ratio_level is RatioLevel.TOKEN and spec.delta is None:
        assert values["clipped_fraction"] == pytest.approx(metrics["clip_ratio/region_mean"][0], abs=1e-6)
    if spec.kl_coef:
        assert values["reference_kl"] == pytest.approx(metrics["kl"][0], abs=1e-6)


@pytest.mark.parametrize("mode", CorrectionMode)
@pytest.mark.parametrize("level", RatioLevel)
def test_the_correction_acts_where_trl_lets_it_act(mode: CorrectionMode, level: RatioLevel) -> None:
    """The weights as in GRPOTrainer's generation step (they are not a function there), the loss by TRL."""
    given = columns(1)
    difference = (given["old"] - given["sampled"]) * MASK
    if level is RatioLevel.SEQUENCE:
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    cap = 1.7
    bounded = ratio.clamp(max=cap) if mode is CorrectionMode.TRUNCATE else ratio.masked_fill(ratio > cap, 0.0)
    theirs, their_gradient, _ = of_trl(given, is_ratio=bounded, loss_type="dapo", beta=0.1)
    correction = Correction(mode=mode, level=level, cap=cap)
    spec = LossSpec(**PPO, kl_coef=0.1, proximal_version=0, correction=correction)
    ours, our_gradient, _ = of_quartet(spec, given, N)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    torch.testing.assert_close(our_gradient, their_gradient, atol=1e-6, rtol=0)


def test_synchronisation_of_the_reference_equals_trl() -> None:
    from quartet_trainer.reference import Reference
    from quartet_trainer.spec import ReferenceSpec
    from trl.trainer.callbacks import SyncRefModelCallback

    torch.manual_seed(0)
    policy, held = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    weights = {name: parameter.detach().clone() for name, parameter in held.named_parameters()}
    reference = Reference(ReferenceSpec(sync_steps=2, mixup_alpha=0.6), lambda samples, t: [], weights, None)
    reference.stepped(3, dict(policy.named_parameters()))
    assert torch.equal(weights["weight"], held.weight)
    reference.stepped(4, dict(policy.named_parameters()))
    SyncRefModelCallback._sync_target_model(policy, held, 0.6)
    for name, parameter in held.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), atol=1e-6, rtol=0)
