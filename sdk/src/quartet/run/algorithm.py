"""The [algorithm] table: credit and loss, as values. docs/algorithms.md says what each of them computes.

1. A preset is a set of values; every key that is given beside it wins.
2. The names of the field are keys, too: epsilon (clip_low, and clip_high where epsilon_high is not given),
   epsilon_high (clip_high), beta (kl_coef).
3. A setting that the chosen loss would not read is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from quartet.config.model import rule
from quartet.run.algorithm_tables import ReferenceConfig
from quartet.run.credit import CreditConfig
from quartet.run.presets import OF_THE_LOSS, POLICY_GRADIENTS, PRESETS, PresetConfig
from quartet.run.ratio import RatioConfig
from quartet.run.values import NonNegative, Number, Positive, PositiveCount, Table, Text

#: Each is a pass over the batch; what so many do not teach it, another batch will.
MAX_ITERATIONS = 16
#: A mini-batch has one group at least, and an optimizer step is two calls of the trainer.
MAX_MINIBATCHES = 64
#: As far as an adapted entropy_coef grows.
MAX_ENTROPY_COEF = 1.0
#: Names of loss = "custom" that every trainer has without being given them: those of prime-rl's files.
SHIPPED_LOSSES = ("prime_rl_dppo", "prime_rl_ipo")
#: Of one setting each. ("epsilon" may be of two.)
TWO_NAMES = (("algorithm.beta", "algorithm.kl_coef"), ("algorithm.epsilon_high", "algorithm.clip_high"))


class AlgorithmConfig(RatioConfig, CreditConfig, PresetConfig):
    """Credit and loss."""

    ALSO_KEYS: ClassVar = ("epsilon", "epsilon_high", "beta")

    #: Absent: "constant" for dr_grpo, else "token".
    aggregation: Literal["token", "sequence", "constant"] | None = None
    #: What each rollout adds to the normaliser of aggregation = "constant"; absent: sampling.max_tokens.
    constant_tokens: PositiveCount | None = None
    #: Weight of the divergence from the reference.
    kl_coef: NonNegative = 0.0
    #: How the divergence of a token is estimated.
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    #: kl_coef is adapted until the divergence is this.
    target_kl: Positive | None = None
    #: Weight of the entropy, which is to be high.
    entropy_coef: Number = 0.0
    #: Below so many nats entropy_coef acts and grows, above it does not and falls, ...
    target_entropy: Positive | None = None
    #: ... by so much in each optimizer step; absent: 0.005.
    entropy_coef_delta: Annotated[float, Field(gt=0, le=MAX_ENTROPY_COEF, strict=True)] | None = None
    #: Passes over each batch, ...
    num_iterations: Annotated[int, Field(ge=1, le=MAX_ITERATIONS, strict=True)] = 1
    #: ... each of so many optimizer steps, on equal parts of its groups.
    num_minibatches: Annotated[int, Field(ge=1, le=MAX_MINIBATCHES, strict=True)] = 1
    #: Of a mixture of experts: send each token to the experts that took it when it was sampled.
    router_replay: bool = False
    #: The policy gradient learns from this share of a batch's tokens, those of the highest entropy.
    top_entropy_quantile: Annotated[float, Field(gt=0, lt=1, strict=True)] | None = None
    #: Advantages get what the reference thinks of each token: on-policy distillation.
    distill: bool = False
    reference: ReferenceConfig | None = None
    #: loss = "custom": a name of `losses` in the trainer's configuration, or one that it has anyway.
    custom: Text | None = None
    #: What that function gets by name: numbers, texts and booleans.
    custom_args: Table = Field(default_factory=dict)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that a batch takes."""
        return self.num_iterations * self.num_minibatches

    @property
    def normalised_by(self) -> Literal["token", "sequence", "constant"]:
        """The aggregation that is used."""
        return self.aggregation or ("constant" if self.advantage == "dr_grpo" else "token")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads log-probabilities of a reference."""
        return self.distill or self.kl_coef > 0

    @property
    def has_teacher(self) -> bool:
        """Whether another service scores what was sampled, so that a batch carries its log-probabilities."""
        return self.reference is not None and self.reference.address is not None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _by_any_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return _with_preset(_without_aliases(snake(data)))

    @rule
    def _entropy_is_read(self) -> Iterator[str]:
        if self.top_entropy_quantile is not None and self.loss not in POLICY_GRADIENTS:
            yield (
                f'top_entropy_quantile chooses tokens of a policy gradient, which loss = "{self.loss}" is '
                "not; remove it"
            )
        if self.target_entropy is None and self.entropy_coef_delta is not None:
            yield "entropy_coef_delta belongs to target_entropy; give both, or remove it"
        if self.target_entropy is not None and not 0 <= self.entropy_coef <= MAX_ENTROPY_COEF:
            yield (
                f"target_entropy adapts entropy_coef, here {self.entropy_coef}, within 0 and "
                f"{MAX_ENTROPY_COEF:g}; begin in there"
            )

    @rule
    def _constant_is_used(self) -> Iterator[str]:
        if self.constant_tokens is not None and self.normalised_by != "constant":
            yield (
                f'constant_tokens belongs to aggregation = "constant", which here is "{self.normalised_by}"; '
                "choose it, or remove constant_tokens"
            )

    @rule
    def _reference_is_read(self) -> Iterator[str]:
        teaches = self.reference is not None and (self.reference.model or self.reference.address)
        if self.distill and self.loss in ("cross_entropy", "custom"):
            yield (
                f'distill = true gives advantages to a policy gradient, which loss = "{self.loss}" is not; '
                'remove it, or choose a loss that is one, such as "none"'
            )
        elif self.distill and not teaches:
            yield "distill needs a teacher: give algorithm.reference a model or an address"
        if self.reference is not None and not self.needs_reference:
            yield "reference is not read: set kl_coef above 0, or distill to true, or remove it"
        if self.target_kl is not None and not self.kl_coef:
            yield "target_kl adapts kl_coef; set a kl_coef above 0 to begin with"
        if self.kl_estimator != "k3" and not self.kl_coef:
            yield (
                f'kl_estimator = "{self.kl_estimator}" belongs to kl_coef, which is 0; set that above 0, or '
                "remove it"
            )
        if self.kl_weighted and not self.kl_coef:
            yield "kl_weighted belongs to kl_coef, which is 0; set that above 0, or remove it"
        other = self.distill or self.kl_coef or self.entropy_coef or self.target_entropy
        if self.advantage == "zero" and not other:
            yield ('advantage = "zero" leaves nothing to learn from; set distill, or another advantage')

    @rule
    def _own_functions_are_named(self) -> Iterator[str]:
        if (self.loss == "custom") != (self.custom is not None):
            yield 'custom names the function of loss = "custom"; give both or neither'
        if (self.advantage == "custom") != (self.custom_advantage is not None):
            yield ('custom_advantage names the function of advantage = "custom"; give both or neither')
        if self.custom_args and self.custom is None:
            yield 'custom_args are given to the function of loss = "custom"; remove them'
        for name, value in self.custom_args.items():
            if not name.isidentifier():
                yield f"custom_args.{name}: a function takes nothing of that name; rename it"
            if not isinstance(value, bool | int | float | str):
                yield (
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
