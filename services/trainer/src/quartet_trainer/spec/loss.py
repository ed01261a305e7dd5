"""What defines a loss, as values. The formulas are in quartet_trainer/loss.

1. A LossSpec that exists can be computed: a setting that its loss would not read is refused, not ignored.
2. Defaults that depend on another setting (clips) are filled in by `clip_bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

import pydantic

from quartet_trainer.spec.value import Value

CISPO_CLIP_HIGH = 4.0
PPO_CLIP = 0.2
#: Of probabilities, not of ratios: how far one may move (DPPO, arXiv 2602.04879).
DPPO_CLIP = 0.2
SAPO_TAU_POSITIVE, SAPO_TAU_NEGATIVE = 1.0, 1.05
#: As far as an entropy_coef is adapted, and by how much in a step.
MAX_ADAPTED_ENTROPY_COEF, ENTROPY_COEF_DELTA = 1.0, 0.005
#: Settings that only some treatments of the ratio read, and which.
_OF_A_RATIO = {
    "clip_low": ("cispo", "ppo", "dppo"),
    "clip_high": ("cispo", "ppo", "dppo"),
    "tau_positive": ("sapo",),
    "tau_negative": ("sapo",),
    "kernel": ("vespo",),
}


class LossKind(StrEnum):
    """Which loss."""

    POLICY_GRADIENT = "policy_gradient"
    CROSS_ENTROPY = "cross_entropy"
    REFERENCE_KL = "reference_kl"
    CUSTOM = "custom"


class Ratio(StrEnum):
    """What is done with the ratio between the current policy and the one it is compared with."""

    CISPO = "cispo"
    PPO = "ppo"
    DPPO = "dppo"
    SAPO = "sapo"
    VESPO = "vespo"
    NONE = "none"


class RatioLevel(StrEnum):
    """Of what a ratio is taken."""

    TOKEN = "token"
    SEQUENCE = "sequence"


class Aggregation(StrEnum):
    """How the tokens of a sample weigh."""

    TOKEN = "token"
    SEQUENCE = "sequence"


class KlEstimator(StrEnum):
    """How the divergence from the reference is estimated."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class CorrectionMode(StrEnum):
    """What happens to tokens on which sampler and proximal policy disagree."""

    TRUNCATE = "truncate"
    MASK = "mask"


class Correction(Value):
    """A weight of each token: proximal over sampler's probability, bounded."""

    mode: CorrectionMode
    level: RatioLevel = RatioLevel.TOKEN
    cap: float = pydantic.Field(default=2.0, gt=0)
    floor: float = pydantic.Field(default=0.0, ge=0)

    @pydantic.model_validator(mode="after")
    def _bounds(self) -> Correction:
        if self.floor and self.mode is CorrectionMode.TRUNCATE:
            raise ValueError("correction.floor belongs to MASK; leave it out")
        if self.floor >= self.cap:
            raise ValueError(f"correction.floor = {self.floor} is not below cap = {self.cap}")
        return self


class VespoKernel(Value):
    """Weighs a sample by its ratio W, for advantages above 0 and for others: W^k * exp(lambda * (1 - W))."""

    k_positive: float = pydantic.Field(default=2.0, gt=0)
    lambda_positive: float = pydantic.Field(default=3.0, gt=0)
    k_negative: float = pydantic.Field(default=3.0, gt=0)
    lambda_negative: float = pydantic.Field(default=2.0, gt=0)


class LossSpec(Value):
    """A loss."""

    kind: LossKind = LossKind.POLICY_GRADIENT
    ratio: Ratio = Ratio.CISPO
    clip_low: float | None = pydantic.Field(default=None, ge=0)
    clip_high: float | None = pydantic.Field(default=None, gt=0)
    temperature: float = pydantic.Field(default=1.0, gt=0)
    ratio_level: RatioLevel = RatioLevel.TOKEN
    aggregation: Aggregation = Aggregation.TOKEN
    delta: float | None = pydantic.Field(default=None, gt=0)
    kl_coef: float = pydantic.Field(default=0.0, ge=0)
    kl_estimator: KlEstimator = KlEstimator.K3
    target_kl: float | None = pydantic.Field(default=None, gt=0)
    entropy_coef: float = 0.0
    proximal_version: int | None = pydantic.Field(default=None, ge=0)
    proximal_returns: bool = False
    correction: Correction | None = None
    custom: str = ""
    #: What the function of that name gets by name.
    custom_args: dict[str, bool | int | float | str] = pydantic.Field(default_factory=dict)
    tau_positive: float | None = pydantic.Field(default=None, gt=0)
    tau_negative: float | None = pydantic.Field(default=None, gt=0)
    kernel: VespoKernel | None = None
    kl_weighted: bool = False
    off_policy_mask: float | None = pydantic.Field(default=None, gt=0)
    top_entropy_quantile: float | None = pydantic.Field(default=None, gt=0, lt=1)
    target_entropy: float | None = pydantic.Field(default=None, gt=0)
    entropy_coef_delta: float | None = pydantic.Field(default=None, gt=0, le=MAX_ADAPTED_ENTROPY_COEF)

    @property
    def compares(self) -> bool:
        """Whether the loss has a ratio, so that it needs what the policy is compared with."""
        return self.kind in (LossKind.POLICY_GRADIENT, LossKind.REFERENCE_KL) and self.ratio is not Ratio.NONE

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads log-probabilities of a reference."""
        return self.kind is LossKind.REFERENCE_KL or self.kl_coef > 0

    @property
    def needs_advantages(self) -> bool:
        """Whether a sample without them cannot be trained on."""
        return self.kind in (LossKind.POLICY_GRADIENT, LossKind.CUSTOM)

    @property
    def moves_without_advantage(self) -> bool:
        """Whether a sample whose advantages are all zero has a gradient."""
        return (
            self.kind in (LossKind.REFERENCE_KL, LossKind.CUSTOM)
            or self.kl_coef > 0
            or self.entropy_coef != 0
        )

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The interval that the ratio is clamped to; for DPPO that of the difference of probabilities."""
        low, high = self.clip_low, self.clip_high
        match self.ratio:
            case Ratio.CISPO:
                return low or 0.0, CISPO_CLIP_HIGH if high is None else high
            case Ratio.PPO:
                return 1.0 - (PPO_CLIP if low is None else low), 1.0 + (PPO_CLIP if high is None else high)
            case Ratio.DPPO:
                return -(DPPO_CLIP if low is None else low), DPPO_CLIP if high is None else high
            case Ratio.SAPO | Ratio.VESPO | Ratio.NONE:
                return 0.0, math.inf

    @property
    def taus(self) -> tuple[float, float]:
        """Of SAPO's gate, for advantages above 0 and for others."""
        positive, negative = self.tau_positive, self.tau_negative
        return (
            SAPO_TAU_POSITIVE if positive is None else positive,
            SAPO_TAU_NEGATIVE if negative is None else negative,
        )

    @pydantic.model_validator(mode="after")
    def _is_read(self) -> LossSpec:
        given = self.model_fields_set
        if (self.kind is LossKind.CUSTOM) != bool(self.custom):
            raise ValueError("custom names the function of LOSS_KIND_CUSTOM, and of no other kind")
        if self.custom_args and not self.custom:
            raise ValueError("custom_args belong to the function that custom names; leave them out")
        if not self.compares:
            what = self.kind.value if self.kind is LossKind.CROSS_ENTROPY else "a loss without a ratio"
            unread = ["correction", "kl_weighted", "off_policy_mask"]
            # A function of one's own reads what it likes; only the proximal policy has to be computed for it.
            if self.kind is not LossKind.CUSTOM:
                unread += [*_OF_A_RATIO, "delta", "proximal_version"]
            self._leaves_out(what, unread)
            if self.ratio_level is RatioLevel.SEQUENCE and self.kind is not LossKind.CUSTOM:
                raise ValueError(f"{what} does not read ratio_level; leave it out")
        else:
            self._check_ratio()
        self._check_delta()
        self._check_entropy()
        if self.correction is not None and self.proximal_version is None:
            raise ValueError("correction weighs proximal against sampler; give proximal_version, too")
        if self.proximal_returns and self.proximal_version is None:
            raise ValueError("proximal_returns says that proximal_version comes again; give that, too")
        if self.target_kl is not None and not self.kl_coef:
            raise ValueError("target_kl adapts kl_coef; give a kl_coef above 0 to begin with")
        if "kl_estimator" in given and not self.kl_coef:
            raise ValueError("kl_estimator belongs to kl_coef; give a kl_coef above 0, or leave it out")
        if self.kl_weighted and not self.kl_coef:
            raise ValueError("kl_weighted belongs to kl_coef; give a kl_coef above 0, or leave it out")
        return self

    def _leaves_out(self, what: str, names: Iterable[str]) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value is not False:  # 0 is said, too
                raise ValueError(f"{what} does not read {name}; leave it out")

    def _check_ratio(self) -> None:
        self._leaves_out(self.ratio.value, (name for name, of in _OF_A_RATIO.items() if self.ratio not in of))
        low, high = self.clip_bounds
        if self.ratio is Ratio.CISPO and low > high:
            raise ValueError(f"clip_low = {low:g} is above clip_high = {high:g}; set it to at most that")
        if self.ratio is Ratio.DPPO and self.ratio_level is RatioLevel.SEQUENCE:
            raise ValueError("DPPO bounds probabilities of tokens; choose ratio_level TOKEN")
        if self.ratio is Ratio.VESPO:
            if self.ratio_level is RatioLevel.SEQUENCE:
                raise ValueError("VESPO takes the product over a sample, not its mean; leave out ratio_level")
            if self.correction is not None:
                raise ValueError(
                    "VESPO's kernel is of the whole ratio to the sampler; leave out correction and "
                    "proximal_version"
                )

    def _check_entropy(self) -> None:
        if self.kind in (LossKind.CROSS_ENTROPY, LossKind.CUSTOM):
            self._leaves_out(self.kind.value, ["top_entropy_quantile"])
        if self.target_entropy is None:
            if self.entropy_coef_delta is not None:
                raise ValueError("entropy_coef_delta belongs to target_entropy; give both, or leave it out")
        elif not 0 <= self.entropy_coef <= MAX_ADAPTED_ENTROPY_COEF:
            raise ValueError(
                f"entropy_coef = {self.entropy_coef} is adapted to target_entropy within "
                f"[0, {MAX_ADAPTED_ENTROPY_COEF:g}]; begin in there"
            )

    def _check_delta(self) -> None:
        if self.delta is None or self.kind is LossKind.CUSTOM:
            return
        if self.ratio is not Ratio.PPO:
            raise ValueError(f"delta bounds the ratio of PPO; {self.ratio.value} does not read it")
        _, high = self.clip_bounds
        if self.delta <= high:
            raise ValueError(f"delta = {self.delta} is not above 1 + clip_high = {high}, so it replaces it")
