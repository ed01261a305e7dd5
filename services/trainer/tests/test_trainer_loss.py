"""Every switch of the loss against the formula of its paper, written in numpy float64, loss and gradient.

Ragged samples; the gradient is the derivative with respect to log p, worked out by hand below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from quartet_trainer.loss import Tokens, diagnostics, token_losses
from quartet_trainer.loss.correction import correction_weights
from quartet_trainer.spec import (
    Aggregation,
    Correction,
    CorrectionMode,
    KlEstimator,
    LossKind,
    LossSpec,
    Ratio,
    RatioLevel,
    VespoKernel,
)

rng = np.random.default_rng(3)
LENGTHS = np.array([1, 7, 40, 3, 120, 29])
K = int(LENGTHS.sum())
SAMPLE = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
LOGP = rng.uniform(-5, -0.1, K)
SAMPLED = np.minimum(LOGP + rng.normal(0, 0.8, K), -0.01)
PROXIMAL = np.minimum(LOGP + rng.normal(0, 0.3, K), -0.01)
REFERENCE = LOGP + rng.normal(0, 0.5, K)
ADVANTAGE = rng.normal(0, 1, K)
ENTROPY = rng.uniform(0, 2, K)
TOP = 0.3
UNCERTAIN = np.sort(ENTROPY)[K - int(np.ceil(TOP * K)) - 1] < ENTROPY


def tokens(**changed: Any) -> Tokens:
    values = {"sampled_K": SAMPLED, "reference_K": REFERENCE, "proximal_K": None} | changed
    columns = {name: None if value is None else torch.tensor(value) for name, value in values.items()}
    logp, entropy = (torch.tensor(value, requires_grad=True) for value in (LOGP, ENTROPY))
    return Tokens(logp, entropy, torch.tensor(ADVANTAGE), torch.tensor(LENGTHS), **columns)


def mean_of_sample(values: np.ndarray) -> np.ndarray:
    return np.array([values[s == SAMPLE].mean() for s in range(len(LENGTHS))])[SAMPLE]


def surrogate(
    spec: LossSpec, logp: np.ndarray, compared: np.ndarray, advantage: np.ndarray, at: np.ndarray
) -> np.ndarray:
    """Loss of each token as a function of logp; `at` is logp where the formula stops the gradient."""
    level = mean_of_sample if spec.ratio_level is RatioLevel.SEQUENCE else lambda values: values
    ratio, stopped = np.exp(level(logp - compared)), np.exp(level(at - compared))
    if spec.ratio is Ratio.NONE:
        return -advantage * logp
    if spec.ratio is Ratio.CISPO:
        high = 4.0 if spec.clip_high is None else spec.clip_high
        return -np.clip(stopped, spec.clip_low or 0.0, high) * advantage * logp
    if spec.ratio is Ratio.SAPO:
        tau = np.where(advantage > 0, spec.tau_positive or 1.0, spec.tau_negative or 1.05)
        return -advantage * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
    if spec.ratio is Ratio.VESPO:
        whole = np.exp(mean_of_sample(at - compared) * LENGTHS[SAMPLE])
        given = spec.kernel or VespoKernel(k_positive=2, lambda_positive=3, k_negative=3, lambda_negative=2)
        k = np.where(advantage > 0, given.k_positive, given.k_negative)
        slope = np.where(advantage > 0, given.lambda_positive, given.lambda_negative)
        return -(whole**k) * np.exp(slope * (1 - whole)) * advantage * logp
    low = 0.2 if spec.clip_low is None else spec.clip_low
    high = 0.2 if spec.clip_high is None else spec.clip_high
    if spec.ratio is Ratio.DPPO:
        moved = np.exp(at) - np.exp(compared)
        drop = np.where(advantage > 0, moved > high, moved < -low)
        return np.where(drop, 0, -advantage * ratio)
    free = ratio if spec.delta is None else np.minimum(ratio, spec.delta)
    return -np.minimum(free * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def masked(threshold: float, advantage: np.ndarray) -> np.ndarray:
    return (advantage < 0) & (mean_of_sample(SAMPLED - LOGP) > threshold)


def formula(spec: LossSpec, logp: np.ndarray, at: np.ndarray, proximal: bool) -> np.ndarray:
    compared = PROXIMAL if proximal else SAMPLED
    advantage = ADVANTAGE
    if spec.kind is LossKind.CROSS_ENTROPY:
        loss = -ADVANTAGE * logp
    else:
        if spec.kind is LossKind.REFERENCE_KL:
            advantage = ADVANTAGE + REFERENCE - at
        loss = surrogate(spec, logp, compared, advantage, at)
    if spec.correction is not None:
        log_w = PROXIMAL - SAMPLED
        if spec.correction.level is RatioLevel.SEQUENCE:
            log_w = mean_of_sample(log_w) * LENGTHS[SAMPLE]
        w = np.exp(np.clip(log_w, -20, 20))
        inside = (w >= spec.correction.floor) & (w <= spec.correction.cap)
        masks = spec.correction.mode is CorrectionMode.MASK
        loss = loss * (np.where(inside, w, 0) if masks else np.minimum(w, spec.correction.cap))
    if spec.off_policy_mask is not None:
        loss = np.where(masked(spec.off_policy_mask, advantage), 0, loss)
    if spec.top_entropy_quantile is not None:
        loss = np.where(UNCERTAIN, loss, 0)
    d = REFERENCE - logp
    kl = {KlEstimator.K1: -d, KlEstimator.K2: d * d / 2, KlEstimator.K3: np.exp(d) - d - 1}[spec.kl_estimator]
    if spec.kl_weighted:
        kl = kl * np.exp(logp - compared)
    loss = loss + spec.kl_coef * kl - spec.entropy_coef * ENTROPY
    return loss / LENGTHS[SAMPLE] if spec.aggregation is Aggregation.SEQUENCE else loss


SEQUENCE = {"ratio_level": RatioLevel.SEQUENCE}
#: Between what the samples here have moved.
OFF_POLICY = float(np.median(mean_of_sample(SAMPLED - LOGP)))
SPECS = [
    LossSpec(),
    LossSpec(clip_high=1.1),
    LossSpec(clip_low=0.9, clip_high=1.1),
    LossSpec(**SEQUENCE, clip_high=1.05),
    LossSpec(ratio=Ratio.PPO),
    LossSpec(ratio=Ratio.PPO, clip_low=0.1, clip_high=0.28),
    LossSpec(ratio=Ratio.PPO, delta=1.5, clip_high=0.28),
    LossSpec(ratio=Ratio.PPO, aggregation=Aggregation.SEQUENCE),
    LossSpec(ratio=Ratio.PPO, **SEQUENCE, aggregation=Aggregation.SEQUENCE, clip_low=3e-2, clip_high=4e-2),
    LossSpec(ratio=Ratio.DPPO),
    LossSpec(ratio=Ratio.DPPO, clip_low=0.05, clip_high=0.1),
    LossSpec(ratio=Ratio.SAPO, aggregation=Aggregation.SEQUENCE),
    LossSpec(ratio=Ratio.SAPO, tau_positive=0.5, tau_negative=3.0, **SEQUENCE),
    LossSpec(ratio=Ratio.VESPO),
    LossSpec(ratio=Ratio.VESPO, kernel=VespoKernel(k_positive=0.5, lambda_negative=0.1), proximal_version=3),
    LossSpec(kind=LossKind.REFERENCE_KL, ratio=Ratio.VESPO, aggregation=Aggregation.SEQUENCE),
    LossSpec(ratio=Ratio.NONE),
    LossSpec(ratio=Ratio.NONE, entropy_coef=0.3, aggregation=Aggregation.SEQUENCE),
    LossSpec(kind=LossKind.CROSS_ENTROPY),
    LossSpec(kind=LossKind.CROSS_ENTROPY, kl_coef=0.2),
    LossSpec(kind=LossKind.REFERENCE_KL),
    LossSpec(kind=LossKind.REFERENCE_KL, ratio=Ratio.NONE),
    LossSpec(kind=LossKind.REFERENCE_KL, ratio=Ratio.DPPO),
    *(LossSpec(ratio=Ratio.PPO, kl_coef=0.7, kl_estimator=one) for one in KlEstimator),
    *(LossSpec(kl_coef=0.7, kl_estimator=one, kl_weighted=True) for one in KlEstimator),
    LossSpec(ratio=Ratio.PPO, **SEQUENCE, kl_coef=0.7, kl_weighted=True, proximal_version=3),
    LossSpec(ratio=Ratio.PPO, off_policy_mask=OFF_POLICY, kl_coef=0.1),
    LossSpec(kind=LossKind.REFERENCE_KL, off_policy_mask=OFF_POLICY, proximal_version=3),
    LossSpec(ratio=Ratio.NONE, top_entropy_quantile=TOP, entropy_coef=0.3),
    LossSpec(ratio=Ratio.PPO, **SEQUENCE, top_entropy_quantile=TOP, kl_coef=0.1),
    LossSpec(kind=LossKind.REFERENCE_KL, top_entropy_quantile=TOP, aggregation=Aggregation.SEQUENCE),
    LossSpec(ratio=Ratio.PPO, proximal_version=3),
    *(
        LossSpec(ratio=Ratio.PPO, proximal_version=3, correction=Correction(mode=mode, level=level, cap=1.6))
        for mode in CorrectionMode
        for level in RatioLevel
    ),
    LossSpec(proximal_version=3, correction=Correction(mode=CorrectionMode.MASK, cap=1.5, floor=0.5)),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: repr(spec.model_dump(exclude_defaults=True)))
def test_loss_and_gradient_equal_the_formula(spec: LossSpec) -> None:
    proximal = spec.proximal_version is not None
    uncertain = None if spec.top_entropy_quantile is None else UNCERTAIN
    ours = tokens(proximal_K=PROXIMAL if proximal else None, top_entropy_K=uncertain)
    losses = token_losses(spec, ours)
    np.testing.assert_allclose(losses.detach(), formula(spec, LOGP, LOGP, proximal), atol=1e-6)
    losses.sum().backward()
    step = 1e-5
    for place in range(0, K, 7):
        moved = np.zeros(K)
        moved[place] = step
        up, down = (formula(spec, LOGP + sign * moved, LOGP, proximal).sum() for sign in (1, -1))
        assert float(ours.logp_K.grad[place]) == pytest.approx((up - down) / (2 * step), abs=1e-6), place
    if spec.entropy_coef:
        weight = 1 / LENGTHS[SAMPLE] if spec.aggregation is Aggregation.SEQUENCE else 1.0
        np.testing.assert_allclose(ours.entropy_K.grad, -spec.entropy_coef * weight, atol=1e-9)


def test_diagnostics_equal_the_formulas() -> None:
    values = diagnostics(LossSpec(ratio=Ratio.PPO, kl_coef=0.1), detached(tokens()))
    ratio = np.exp(LOGP - SAMPLED)
    clipped = np.where(ADVANTAGE > 0, ratio > 1.2, ratio < 0.8)
    d = REFERENCE - LOGP
    assert values == pytest.approx(
        {
            "entropy": ENTROPY.mean(),
            "logprob_mean": LOGP.mean(),
            "ratio_max": ratio.max(),
            "ratio_mean": ratio.mean(),
            "clipped_fraction": clipped.mean(),
            "mismatch_kl": (ratio - 1 - np.log(ratio)).mean(),
            "logprob_difference_mean": np.abs(LOGP - SAMPLED).mean(),
            "logprob_difference_max": np.abs(LOGP - SAMPLED).max(),
            "effective_sample_size": ratio.sum() ** 2 / (K * (ratio**2).sum()),
            "reference_kl": (np.exp(d) - d - 1).mean(),
        },
        rel=1e-6,
    )


def test_diagnostics_of_a_correction_and_of_probability_masks() -> None:
    correction = Correction(mode=CorrectionMode.TRUNCATE, cap=1.6)
    spec = LossSpec(ratio=Ratio.DPPO, clip_high=0.05, proximal_version=1, correction=correction)
    values = diagnostics(spec, detached(tokens(proximal_K=PROXIMAL)))
    w, moved = np.exp(PROXIMAL - SAMPLED), np.exp(LOGP) - np.exp(PROXIMAL)
    assert values["correction_mean"] == pytest.approx(np.minimum(w, 1.6).mean(), rel=1e-6)
    assert values["correction_bounded_fraction"] == pytest.approx((w > 1.6).mean(), rel=1e-6)
    masked = np.where(ADVANTAGE > 0, moved > 0.05, moved < -0.2)
    assert values["clipped_fraction"] == pytest.approx(masked.mean(), rel=1e-6)
    assert values["ratio_max"] == pytest.approx(np.exp(LOGP - PROXIMAL).max(), rel=1e-6)


def test_diagnostics_of_a_ratio_of_samples_and_of_one_that_delta_bounds() -> None:
    spec = LossSpec(ratio=Ratio.PPO, clip_high=0.28, delta=1.5)
    ratio = np.exp(LOGP - SAMPLED)
    clipped = np.where(ADVANTAGE > 0, ratio > 1.28, (ratio < 0.8) | (ratio > 1.5))
    values = diagnostics(spec, detached(tokens()))
    assert values["clipped_fraction"] == pytest.approx(clipped.mean(), rel=1e-6)
    of_samples = np.exp(mean_of_sample(LOGP - SAMPLED))
    values = diagnostics(LossSpec(**SEQUENCE, clip_high=1.05), detached(tokens()))
    assert values["ratio_max"] == pytest.approx(of_samples.max(), rel=1e-6)
    assert values["ratio_mean"] == pytest.approx(of_samples.mean(), rel=1e-6)
    assert values["clipped_fraction"] == pytest.approx((of_samples > 1.05).mean(), rel=1e-6)


def test_diagnostics_of_whole_samples_and_of_those_that_moved_too_far() -> None:
    values = diagnostics(LossSpec(ratio=Ratio.VESPO, off_policy_mask=OFF_POLICY), detached(tokens()))
    whole = np.exp(np.clip(mean_of_sample(LOGP - SAMPLED) * LENGTHS[SAMPLE], -20, 20))
    assert values["ratio_max"] == pytest.approx(whole.max(), rel=1e-6)
    assert values["ratio_mean"] == pytest.approx(whole.mean(), rel=1e-6)
    assert values["clipped_fraction"] == 0.0
    share = masked(OFF_POLICY, ADVANTAGE).mean()
    assert values["off_policy_masked_fraction"] == pytest.approx(share, rel=1e-6) and 0 < share < 0.5


def test_diagnostics_of_the_tokens_of_the_highest_entropy() -> None:
    spec = LossSpec(top_entropy_quantile=TOP)
    values = diagnostics(spec, detached(tokens(top_entropy_K=UNCERTAIN)))
    assert values["top_entropy_fraction"] == pytest.approx(TOP, abs=1 / K)
    assert values["top_entropy_threshold"] == ENTROPY[UNCERTAIN].min()


def test_diagnostics_tell_nothing_of_a_sampler_that_nobody_told_of() -> None:
    likelihood = LossSpec(kind=LossKind.CROSS_ENTROPY)
    values = diagnostics(likelihood, detached(tokens(sampled_K=None, reference_K=None)))
    assert values.keys() == {"entropy", "logprob_mean"}
    proximal = detached(tokens(sampled_K=None, proximal_K=PROXIMAL, reference_K=None))
    values = diagnostics(LossSpec(proximal_version=1), proximal)
    assert values["ratio_max"] == pytest.approx(np.exp(LOGP - PROXIMAL).max(), rel=1e-6)
    told = {"ratio_max", "ratio_mean", "clipped_fraction"}
    assert values.keys() == {"entropy", "logprob_mean"} | told


def test_of_a_loss_of_ones_own_the_ratio_is_told_by_tokens() -> None:
    own = LossSpec(kind=LossKind.CUSTOM, custom="mine", **SEQUENCE)
    values = diagnostics(own, detached(tokens()))
    assert values["ratio_max"] == pytest.approx(np.exp(LOGP - SAMPLED).max(), rel=1e-6)
    assert "clipped_fraction" not in values


@pytest.mark.parametrize("ratio", [Ratio.PPO, Ratio.DPPO])
def test_a_token_without_advantage_is_not_clipped_by_what_bounds_the_others(ratio: Ratio) -> None:
    """It has no loss that PPO's clip could change; DPPO takes it for one that is to become less likely."""
    spec = LossSpec(ratio=ratio, delta=1.5 if ratio is Ratio.PPO else None)
    for logp, sampled in ((-0.1, -2.0), (-2.0, -0.1)):
        found = one_token(logp, sampled)
        nothing = Tokens(found.logp_K, found.entropy_K, torch.zeros(1), found.lengths_S, found.sampled_K)
        dropped = ratio is Ratio.DPPO and logp < sampled
        assert diagnostics(spec, nothing)["clipped_fraction"] == float(dropped)


@pytest.mark.parametrize(
    "spec",
    [
        LossSpec(clip_low=1.0, clip_high=1.0),
        LossSpec(ratio=Ratio.PPO, clip_low=0.0),
        LossSpec(ratio=Ratio.DPPO, clip_low=0.0),
        LossSpec(ratio=Ratio.SAPO, tau_positive=9.0, tau_negative=9.0),
        LossSpec(ratio=Ratio.VESPO, kernel=VespoKernel(k_negative=50.0, lambda_negative=50.0)),
    ],
    ids=lambda spec: str(spec.ratio),
)
def test_on_policy_the_narrowest_clip_changes_nothing(spec: LossSpec) -> None:
    one = one_token(-2.0, -2.0)
    one.logp_K.requires_grad_(True)
    token_losses(spec, one).sum().backward()
    assert one.logp_K.grad == 1.0, "minus the advantage"
    assert diagnostics(spec, detached(one))["clipped_fraction"] == 0.0


def test_a_correction_keeps_what_is_at_its_bounds() -> None:
    """Where sampler and proximal policy agree, the weight is 1, whichever bound is 1."""
    agreed = tokens(proximal_K=SAMPLED)
    for cap, floor in ((1.0, 0.0), (2.0, 1.0)):
        correction = Correction(mode=CorrectionMode.MASK, cap=cap, floor=floor)
        assert correction_weights(correction, agreed).eq(1.0).all()


def detached(given: Tokens) -> Tokens:
    return Tokens(
        given.logp_K.detach(),
        given.entropy_K.detach(),
        *(given.advantages_K, given.lengths_S, given.sampled_K, given.proximal_K, given.reference_K),
        given.top_entropy_K,
    )


def one_token(logp: float, sampled: float) -> Tokens:
    ones = torch.ones(1)
    return Tokens(torch.tensor([logp]), ones, -ones, torch.tensor([1]), torch.tensor([sampled]))


def test_mismatch_kl_keeps_small_differences() -> None:
    values = diagnostics(LossSpec(), one_token(-2.0 + 1e-4, -2.0))
    assert values["mismatch_kl"] == pytest.approx(5e-9, rel=0.01)


def test_a_vanished_probability_does_not_make_the_batch_infinite() -> None:
    for spec in (
        *(LossSpec(ratio=Ratio.PPO), LossSpec(ratio=Ratio.PPO, **SEQUENCE)),
        *(LossSpec(ratio=Ratio.SAPO), LossSpec(ratio=Ratio.SAPO, **SEQUENCE)),
        *(LossSpec(ratio=Ratio.VESPO), LossSpec(off_policy_mask=0.1)),
    ):
        one = one_token(-1.0, -500.0)
        one.logp_K.requires_grad_(True)
        losses = token_losses(spec, one)
        losses.sum().backward()
        assert torch.isfinite(losses).all() and torch.isfinite(one.logp_K.grad).all()


@pytest.mark.parametrize(
    ("why", "settings"),
    [
        ("clip_high", {"kind": LossKind.CROSS_ENTROPY, "clip_high": 0.2}),
        ("ratio_level", {"ratio": Ratio.NONE, **SEQUENCE}),
        ("clip_low", {"ratio": Ratio.NONE, "clip_low": 0.2}),
        ("proximal_version", {"ratio": Ratio.NONE, "proximal_version": 1}),
        ("proximal_version", {"kind": LossKind.CROSS_ENTROPY, "proximal_version": 0}),
        ("clip_low", {"ratio": Ratio.NONE, "clip_low": 0.0}),
        ("clip_low", {"ratio": Ratio.VESPO, "clip_low": 0.0}),
        ("clip_low = 5 is above clip_high = 4", {"ratio": Ratio.CISPO, "clip_low": 5.0}),
        ("delta", {"ratio": Ratio.CISPO, "delta": 4.0}),
        ("delta", {"ratio": Ratio.PPO, "delta": 1.1}),
        ("probabilities of tokens", {"ratio": Ratio.DPPO, **SEQUENCE}),
        ("clip_high", {"ratio": Ratio.SAPO, "clip_high": 0.2}),
        ("tau_negative", {"ratio": Ratio.PPO, "tau_negative": 1.0}),
        ("tau_positive", {"kind": LossKind.CROSS_ENTROPY, "tau_positive": 1.0}),
        ("kernel", {"ratio": Ratio.SAPO, "kernel": VespoKernel()}),
        ("kernel", {"ratio": Ratio.NONE, "kernel": VespoKernel()}),
        ("clip_high", {"ratio": Ratio.VESPO, "clip_high": 0.2}),
        ("tau_positive", {"ratio": Ratio.VESPO, "tau_positive": 1.0}),
        ("leave out ratio_level", {"ratio": Ratio.VESPO, **SEQUENCE}),
        (
            "leave out correction",
            {
                "ratio": Ratio.VESPO,
                "proximal_version": 1,
                "correction": Correction(mode=CorrectionMode.MASK),
            },
        ),
        ("kl_coef above 0", {"kl_weighted": True}),
        ("kl_weighted", {"ratio": Ratio.NONE, "kl_coef": 0.1, "kl_weighted": True}),
        ("off_policy_mask", {"kind": LossKind.CROSS_ENTROPY, "off_policy_mask": 0.1}),
        ("off_policy_mask", {"kind": LossKind.CUSTOM, "custom": "mine", "off_policy_mask": 0.1}),
        ("top_entropy_quantile", {"kind": LossKind.CROSS_ENTROPY, "top_entropy_quantile": 0.2}),
        ("top_entropy_quantile", {"kind": LossKind.CUSTOM, "custom": "mine", "top_entropy_quantile": 0.2}),
        ("top_entropy_quantile\n  Input should be less than 1", {"top_entropy_quantile": 1.0}),
        ("belongs to target_entropy", {"entropy_coef_delta": 0.1}),
        (r"entropy_coef = -0.1 is adapted .* within \[0, 1\]", {"target_entropy": 1.0, "entropy_coef": -0.1}),
        (r"entropy_coef = 1.1 is adapted", {"target_entropy": 1.0, "entropy_coef": 1.1}),
        ("proximal_version", {"correction": Correction(mode=CorrectionMode.MASK)}),
        ("kl_coef above 0", {"target_kl": 0.1}),
        ("kl_coef above 0", {"kl_estimator": KlEstimator.K1}),
        ("custom", {"kind": LossKind.CUSTOM}),
        ("custom", {"custom": "mine"}),
    ],
)
def test_combinations_that_mean_nothing_are_refused(why: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=why):
        LossSpec(**settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_low", -0.1),
        ("clip_high", 0.0),
        ("temperature", 0.0),
        ("delta", 0.0),
        ("tau_positive", 0.0),
        ("off_policy_mask", 0.0),
        ("top_entropy_quantile", 0.0),
        ("target_entropy", 0.0),
        ("entropy_coef_delta", 0.0),
        ("kl_coef", -0.1),
        ("target_kl", 0.0),
        ("proximal_version", -1),
    ],
)
def test_numbers_out_of_their_range_are_refused(name: str, value: float) -> None:
    settings = {"ratio": Ratio.PPO, "kl_coef": 0.1} | {name: value}
    with pytest.raises(ValidationError, match=rf"{name}\n  Input should be greater than"):
        LossSpec(**settings)


def test_a_loss_of_which_nothing_is_said_is_cispo_and_nothing_else() -> None:
    spec = LossSpec()
    assert (spec.kind, spec.ratio, spec.clip_bounds) == (LossKind.POLICY_GRADIENT, Ratio.CISPO, (0.0, 4.0))
    assert (spec.temperature, spec.kl_coef, spec.entropy_coef) == (1.0, 0.0, 0.0)
    assert (spec.ratio_level, spec.aggregation) == (RatioLevel.TOKEN, Aggregation.TOKEN)
    assert spec.kl_estimator is KlEstimator.K3 and spec.correction is None
    assert LossSpec(temperature=0.1).temperature == 0.1


def test_bounds_of_a_correction_are_checked() -> None:
    for bounds in ({"cap": 0.0}, {"floor": -0.1}):
        with pytest.raises(ValidationError, match="Input should be greater than"):
            Correction(**({"mode": CorrectionMode.MASK} | bounds))
    for bounds in ({"cap": 0.5, "floor": 0.5}, {"mode": CorrectionMode.TRUNCATE, "floor": 0.1}):
        with pytest.raises(ValidationError, match=r"correction\.floor"):
            Correction(**({"mode": CorrectionMode.MASK} | bounds))
