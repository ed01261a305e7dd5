"""The [algorithm] table: credit and loss, as values. docs/algorithms.md says what each of them computes.

1. A preset is a set of values; every key that is given beside it wins.
2. The names of the field are keys, too: epsilon (clip_low, and clip_high where epsilon_high is not given),
   epsilon_high (clip_high), beta (kl_coef).
3. A setting that the chosen loss would not read is refused, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from quartet.config import Config
from quartet.config.model import rule
from quartet.run.algorithm_tables import (
    CorrectionConfig,
    KernelConfig,
    OverlongPenaltyConfig,
    ReferenceConfig,
)
from quartet.run.presets import DEFAULT_LOSS, OF_THE_LOSS, POLICY_GRADIENTS, PRESETS, RATIO_LOSSES
from quartet.run.values import NonNegative, Number, Positive, PositiveCount, Table, Text

#: Each is a pass over the batch; what so many do not teach it, another batch will.
MAX_ITERATIONS = 16
#: A mini-batch has one group at least, and an optimizer step is two calls of the trainer.
MAX_MINIBATCHES = 64
#: As far as an adapted entropy_coef grows.
MAX_ENTROPY_COEF = 1.0
#: A batch of tasks that are all too hard or too easy is sampled so many times over, at most.
MAX_RESAMPLE, DEFAULT_RESAMPLE = 1000, 10
#: Names of loss = "custom" that every trainer has without being given them: those of prime-rl's files.
SHIPPED_LOSSES = ("prime_rl_dppo", "prime_rl_ipo")
#: Losses that have something else instead of clips.
_UNCLIPPED = {"sapo": "tau_positive and tau_negative", "vespo": "a kernel"}


class AlgorithmConfig(Config):
    """Credit and loss."""

    ALSO_KEYS: ClassVar = ("epsilon", "epsilon_high", "beta")

    preset: (
        Literal[
            "grpo",
            "dr_grpo",
            "dapo",
            "cispo",
            "gspo",
            "luspo",
            "dppo",
            "sapo",
            "vespo",
            "rloo",
            "reinforce_pp",
            "max_rl",
            "sft",
            "opd",
        ]
        | None
    ) = None
    #: From rewards to advantages.
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "max_rl", "none", "zero", "custom"] = "grpo"
    #: advantage = "custom": a name of `advantages` in the orchestrator's configuration.
    custom_advantage: Text | None = None
    #: What is done with the importance ratio; or another loss altogether.
    loss: Literal["cispo", "ppo", "dppo", "sapo", "vespo", "none", "cross_entropy", "custom"] = DEFAULT_LOSS
    clip_low: NonNegative | None = None
    clip_high: Positive | None = None
    delta: Positive | None = None
    #: loss = "sapo": how fast its gate closes, for advantages above 0 and for others.
    tau_positive: Positive | None = None
    tau_negative: Positive | None = None
    kernel: KernelConfig | None = None
    ratio_level: Literal["token", "sequence"] = "token"
    #: Absent: "constant" for dr_grpo, else "token".
    aggregation: Literal["token", "sequence", "constant"] | None = None
    #: What each rollout adds to the normaliser of aggregation = "constant"; absent: sampling.max_tokens.
    constant_tokens: PositiveCount | None = None
    #: Weight of the divergence from the reference.
    kl_coef: NonNegative = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    #: Weigh the divergence of each token by its ratio.
    kl_weighted: bool = False
    target_kl: Positive | None = None
    entropy_coef: Number = 0.0
    #: Below so many nats entropy_coef acts and grows, above it does not and falls, ...
    target_entropy: Positive | None = None
    #: ... by so much in each optimizer step; absent: 0.005.
    entropy_coef_delta: Annotated[float, Field(gt=0, le=MAX_ENTROPY_COEF, strict=True)] | None = None
    #: Passes over each batch, ...
    num_iterations: Annotated[int, Field(ge=1, le=MAX_ITERATIONS, strict=True)] = 1
    #: ... each of so many optimizer steps, on equal parts of its groups.
    num_minibatches: Annotated[int, Field(ge=1, le=MAX_MINIBATCHES, strict=True)] = 1
    #: Take the ratio against the policy at the beginning of the batch instead of the sampler.
    proximal: bool = False
    #: Of a mixture of experts: send each token to the experts that took it when it was sampled.
    router_replay: bool = False
    correction: CorrectionConfig | None = None
    #: Rollouts with an advantage below 0 that have become less likely by so many nats a token count for the
    #: group's baseline, and not for the loss.
    off_policy_mask: Positive | None = None
    #: The policy gradient learns from this share of a batch's tokens, those of the highest entropy.
    top_entropy_quantile: Annotated[float, Field(gt=0, lt=1, strict=True)] | None = None
    #: Advantages get what the reference thinks of each token: on-policy distillation.
    distill: bool = False
    reference: ReferenceConfig | None = None
    #: Rollouts that a limit cut count for the group's baseline, and not for the loss.
    overlong_filtering: bool = False
    #: Rewards are lowered by length before they are compared; absent: they are not.
    overlong_penalty: OverlongPenaltyConfig | None = None
    #: Rollouts whose advantages are 0 count for the group's baseline, and not for the loss.
    zero_advantage_filtering: bool = False
    #: Groups whose rewards are all alike teach nothing: fresh ones take their places, ...
    dynamic_sampling: bool = False
    #: ... so many times for one place; then such a group is kept; absent: 10.
    max_resample: Annotated[int, Field(ge=1, le=MAX_RESAMPLE, strict=True)] | None = None
    #: loss = "custom": a name of `losses` in the trainer's configuration, or one that it has anyway.
    custom: Text | None = None
    #: What that function gets by name: numbers, texts and booleans.
    custom_args: Table = Field(default_factory=dict)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that a batch takes."""
        return self.num_iterations * self.num_minibatches

    @property
    def compares(self) -> bool:
        """Whether advantages come of comparing the rewards of a group."""
        return self.advantage not in ("none", "zero")

    @property
    def normalised_by(self) -> Literal["token", "sequence", "constant"]:
        """The aggregation that is used."""
        return self.aggregation or ("constant" if self.advantage == "dr_grpo" else "token")

    @property
    def resamples(self) -> int:
        """How often a place gets a fresh group because the one before it taught nothing."""
        return (self.max_resample or DEFAULT_RESAMPLE) if self.dynamic_sampling else 0

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads log-probabilities of a reference."""
        return self.distill or self.kl_coef > 0

    @pydantic.model_validator(mode="before")
    @classmethod
    def _by_any_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return _with_preset(_without_aliases(snake(data)))

    @pydantic.field_validator("clip_low", "clip_high")
    @classmethod
    def _clip_is_used(cls, value: float | None, info: pydantic.ValidationInfo) -> float | None:
        loss = info.data.get("loss")
        if value is None or loss is None:
            return value
        if loss in _UNCLIPPED:
            raise ValueError(f'loss = "{loss}" does not clip, it has {_UNCLIPPED[loss]}; remove it')
        if loss not in RATIO_LOSSES:
            raise ValueError(f'loss = "{loss}" does not clip; remove it, or choose "cispo" or "ppo"')
        if info.field_name == "clip_low":
            if loss == "cispo":
                raise ValueError(
                    'loss = "cispo" has only clip_high (epsilon_high), the cap of the ratio; remove clip_low '
                    "(epsilon)"
                )
            if value >= 1:
                raise ValueError("the ratio is clipped to 1 - clip_low at least; set it below 1")
        return value

    @rule
    def _ratio_is_read(self) -> None:
        if self.loss not in RATIO_LOSSES:
            unread = {
                "delta": self.delta is not None,
                "ratio_level": self.ratio_level == "sequence",
                "proximal": self.proximal and self.loss != "custom",
                "correction": self.correction is not None,
                "kl_weighted": self.kl_weighted,
                "off_policy_mask": self.off_policy_mask is not None,
            }
            if given := [key for key, is_set in unread.items() if is_set]:
                belong = "belongs" if len(given) == 1 else "belong"
                raise ValueError(
                    f'{", ".join(given)} {belong} to the importance ratio, which loss = "{self.loss}" has not'
                )
        if self.loss != "sapo" and (self.tau_positive is not None or self.tau_negative is not None):
            raise ValueError(f'tau_positive and tau_negative are for loss = "sapo", not for "{self.loss}"')
        if self.loss != "vespo" and self.kernel is not None:
            raise ValueError(f'kernel is for loss = "vespo", not for "{self.loss}"')
        if self.delta is not None and self.loss != "ppo":
            raise ValueError(f'delta bounds the ratio of loss = "ppo"; loss = "{self.loss}" does not read it')
        if self.delta is not None and self.delta <= 1 + (0.2 if self.clip_high is None else self.clip_high):
            raise ValueError(f"delta = {self.delta} is not above 1 + clip_high, so it would replace it")
        if self.ratio_level == "sequence" and self.loss == "dppo":
            raise ValueError('loss = "dppo" bounds probabilities of tokens; set ratio_level to "token"')
        if self.ratio_level == "sequence" and self.loss == "vespo":
            raise ValueError(
                'loss = "vespo" takes the product over a sample, not its mean; remove ratio_level'
            )
        if self.correction is not None and self.loss == "vespo":
            raise ValueError(
                'the kernel of loss = "vespo" is of the whole ratio to the sampler; remove correction and '
                "proximal"
            )
        if self.correction is not None and not self.proximal:
            raise ValueError(
                "correction weighs the proximal policy against the sampler; set proximal to true"
            )

    @rule
    def _entropy_is_read(self) -> None:
        if self.top_entropy_quantile is not None and self.loss not in POLICY_GRADIENTS:
            raise ValueError(
                f'top_entropy_quantile chooses tokens of a policy gradient, which loss = "{self.loss}" is '
                "not; remove it"
            )
        if self.target_entropy is None and self.entropy_coef_delta is not None:
            raise ValueError("entropy_coef_delta belongs to target_entropy; give both, or remove it")
        if self.target_entropy is not None and not 0 <= self.entropy_coef <= MAX_ENTROPY_COEF:
            raise ValueError(
                f"target_entropy adapts entropy_coef, here {self.entropy_coef}, within 0 and "
                f"{MAX_ENTROPY_COEF:g}; begin in there"
            )

    @rule
    def _constant_is_used(self) -> None:
        if self.constant_tokens is not None and self.normalised_by != "constant":
            raise ValueError(
                f'constant_tokens belongs to aggregation = "constant", which here is "{self.normalised_by}"; '
                "choose it, or remove constant_tokens"
            )

    @rule
    def _penalty_is_credited(self) -> None:
        if self.overlong_penalty is not None and self.advantage == "zero":
            raise ValueError(
                'overlong_penalty lowers rewards, which advantage = "zero" does not read; remove it'
            )

    @rule
    def _spread_is_wanted(self) -> None:
        if self.dynamic_sampling and not self.compares:
            raise ValueError(
                f'dynamic_sampling looks for rewards that differ, and advantage = "{self.advantage}" learns '
                "without; set dynamic_sampling to false"
            )
        if self.zero_advantage_filtering and not self.compares:
            raise ValueError(
                f"zero_advantage_filtering looks for rewards that differ, and advantage = "
                f'"{self.advantage}" learns without; remove it'
            )
        if self.max_resample is not None and not self.dynamic_sampling:
            raise ValueError(
                "max_resample bounds dynamic_sampling, which is off; set that to true, or remove it"
            )

    @rule
    def _reference_is_read(self) -> None:
        if self.distill and self.loss in ("cross_entropy", "custom"):
            raise ValueError(
                f'distill gives advantages to a policy gradient, which loss = "{self.loss}" is not'
            )
        teaches = self.reference is not None and (self.reference.model or self.reference.address)
        if self.distill and not teaches:
            raise ValueError("distill needs a teacher: give algorithm.reference a model or an address")
        if self.reference is not None and not self.needs_reference:
            raise ValueError("reference is not read: set kl_coef above 0, or distill to true, or remove it")
        if self.target_kl is not None and not self.kl_coef:
            raise ValueError("target_kl adapts kl_coef; set a kl_coef above 0 to begin with")
        if self.kl_estimator != "k3" and not self.kl_coef:
            raise ValueError(
                f'kl_estimator = "{self.kl_estimator}" belongs to kl_coef, which is 0; set that above 0, or '
                "remove it"
            )
        if self.kl_weighted and not self.kl_coef:
            raise ValueError("kl_weighted belongs to kl_coef, which is 0; set that above 0, or remove it")
        other = self.distill or self.kl_coef or self.entropy_coef or self.target_entropy
        if self.advantage == "zero" and not other:
            raise ValueError(
                'advantage = "zero" leaves nothing to learn from; set distill, or another advantage'
            )

    @rule
    def _own_functions_are_named(self) -> None:
        if (self.loss == "custom") != (self.custom is not None):
            raise ValueError('custom names the function of loss = "custom"; give both or neither')
        if (self.advantage == "custom") != (self.custom_advantage is not None):
            raise ValueError(
                'custom_advantage names the function of advantage = "custom"; give both or neither'
            )
        if self.custom_args and self.custom is None:
            raise ValueError('custom_args are given to the function of loss = "custom"; remove them')
        for name, value in self.custom_args.items():
            if not name.isidentifier():
                raise ValueError(f"custom_args.{name}: a function takes nothing of that name; rename it")
            if not isinstance(value, bool | int | float | str):
                raise ValueError(
                    f"custom_args.{name} = {value} is no number, text or boolean; write it as one of these"
                )


def snake(table: dict[Any, Any]) -> dict[Any, Any]:
    return {key.replace("-", "_") if isinstance(key, str) else key: value for key, value in table.items()}


def _without_aliases(given: dict[Any, Any]) -> dict[Any, Any]:
    epsilon, high, beta = (given.pop(name, None) for name in AlgorithmConfig.ALSO_KEYS)
    for name, value, key in (
        ("epsilon", epsilon, "clip_low"),
        ("epsilon_high", high, "clip_high"),
        ("beta", beta, "kl_coef"),
    ):
        if value is None:
            continue
        if given.get(key) is not None:
            raise ValueError(f"{name} is another name of {key}; give one of the two")
        given[key] = value
    if epsilon is not None and high is None and given.get("clip_high") is None:
        given["clip_high"] = epsilon
    return given


def _with_preset(given: dict[Any, Any]) -> dict[Any, Any]:
    preset = given.get("preset")
    values = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    if "loss" in given and given["loss"] != values.get("loss"):
        values = {key: value for key, value in values.items() if key not in OF_THE_LOSS}
    if "aggregation" in given and given["aggregation"] != values.get("aggregation"):
        values = {key: value for key, value in values.items() if key != "constant_tokens"}
    return {**values, **given}
