"""The loss, and what it makes of the importance ratio: keys of the [algorithm] table that the trainer reads.

1. A setting that the chosen loss would not read is refused, never ignored.
2. So is a bound that would never act, or let nothing through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pydantic

from quartet.config import Config
from quartet.config.model import rule
from quartet.run.algorithm_tables import CorrectionConfig, KernelConfig
from quartet.run.presets import DEFAULT_LOSS, RATIO_LOSSES
from quartet.run.values import NonNegative, Positive

#: Losses that have something else instead of clips.
_UNCLIPPED = {"sapo": "tau_positive and tau_negative", "vespo": "a kernel"}
#: A ratio above that is of two policies that have nothing to do with each other.
MAX_CLIP = 100.0
#: With that a token teaches a fortieth of what it would, once its probability has grown by a twentieth.
MAX_TAU = 100.0


class RatioConfig(Config):
    """A loss, and the ratio between the policy and its sampler."""

    #: What is done with the importance ratio; or another loss altogether.
    loss: Literal["cispo", "ppo", "dppo", "sapo", "vespo", "none", "cross_entropy", "custom"] = DEFAULT_LOSS
    #: How far the ratio, or of "dppo" a probability, may fall; absent: 0.2.
    clip_low: NonNegative | None = None
    #: How far it may rise; of "cispo" the cap; absent: 0.2, of "cispo" 4.
    clip_high: Positive | None = None
    #: loss = "ppo": a bound of the ratio where the advantage is negative.
    delta: Positive | None = None
    #: loss = "sapo": how fast its gate closes for advantages above 0; absent: 1.
    tau_positive: Positive | None = None
    #: The same for others; absent: 1.05.
    tau_negative: Positive | None = None
    kernel: KernelConfig | None = None
    #: Of each token, or one of a whole sample.
    ratio_level: Literal["token", "sequence"] = "token"
    #: Weigh the divergence of each token by its ratio.
    kl_weighted: bool = False
    #: Take the ratio against the policy at the beginning of the batch instead of the sampler.
    proximal: bool = False
    correction: CorrectionConfig | None = None
    #: Rollouts with an advantage below 0 that have become less likely by so many nats a token count for the
    #: group's baseline, and not for the loss.
    off_policy_mask: Positive | None = None

    @pydantic.field_validator("clip_low", "clip_high")
    @classmethod
    def _clip_is_used(cls, value: float | None, info: pydantic.ValidationInfo) -> float | None:
        loss = info.data.get("loss")
        if value is None or loss is None:
            return value
        if loss in _UNCLIPPED:
            raise ValueError(f'loss = "{loss}" does not clip, it has {_UNCLIPPED[loss]}; remove it')
        if loss not in RATIO_LOSSES:
            clips = '"ppo" or "dppo"' if info.field_name == "clip_low" else '"cispo" or "ppo"'
            raise ValueError(f'loss = "{loss}" does not clip; remove it, or choose {clips}')
        if loss == "dppo" and value >= 1:
            raise ValueError("a probability moves by less than 1, so it would bound nothing; set it below 1")
        if info.field_name == "clip_low":
            if loss == "cispo":
                raise ValueError(
                    'loss = "cispo" has only clip_high (epsilon_high), the cap of the ratio; remove clip_low '
                    "(epsilon)"
                )
            if value >= 1:
                raise ValueError("the ratio is clipped to 1 - clip_low at least; set it below 1")
        elif value > MAX_CLIP:
            raise ValueError(f"no ratio gets there, it would bound nothing; set it to {MAX_CLIP:g} at most")
        return value

    @pydantic.field_validator("tau_positive", "tau_negative")
    @classmethod
    def _gate_lets_through(cls, tau: float | None) -> float | None:
        if tau is not None and tau > MAX_TAU:
            raise ValueError(
                "the gate would close on a token whose probability has hardly moved (usual: about 1); set it "
                f"to {MAX_TAU:g} at most"
            )
        return tau

    @rule
    def _ratio_is_read(self) -> Iterator[str]:
        if self.loss not in RATIO_LOSSES:
            unread = {
                f"delta = {self.delta}": self.delta is not None,
                'ratio_level = "sequence"': self.ratio_level == "sequence",
                "proximal = true": self.proximal and self.loss != "custom",
                "correction": self.correction is not None,
                "kl_weighted = true": self.kl_weighted,
                f"off_policy_mask = {self.off_policy_mask}": self.off_policy_mask is not None,
            }
            if given := [one for one, is_set in unread.items() if is_set]:
                belong, it = ("belongs", "it") if len(given) == 1 else ("belong", "them")
                yield (
                    f'{", ".join(given)} {belong} to the importance ratio, which loss = "{self.loss}" has '
                    f'not; remove {it}, or choose a loss that has it, such as "cispo" or "ppo"'
                )
        elif self.delta is not None and self.loss != "ppo":
            yield (
                f'delta = {self.delta} bounds the ratio of loss = "ppo"; loss = "{self.loss}" does not read '
                'it: remove it, or choose "ppo"'
            )
        elif self.delta is not None and self.delta <= 1 + (0.2 if self.clip_high is None else self.clip_high):
            yield (
                f"delta = {self.delta} is not above 1 + clip_high, so it would replace it; raise it, or "
                "remove one of them"
            )
        taus = {"tau_positive": self.tau_positive, "tau_negative": self.tau_negative}
        for name, tau in taus.items() if self.loss != "sapo" else ():
            if tau is not None:
                yield f'{name} = {tau} is for loss = "sapo", not for "{self.loss}"; remove it, or choose that'
        if self.loss != "vespo" and self.kernel is not None:
            yield f'kernel is for loss = "vespo", not for "{self.loss}"; remove it, or choose that'
        if self.ratio_level == "sequence" and self.loss == "dppo":
            yield 'loss = "dppo" bounds probabilities of tokens; set ratio_level to "token"'
        if self.ratio_level == "sequence" and self.loss == "vespo":
            yield ('loss = "vespo" takes the product over a sample, not its mean; remove ratio_level')
        if self.correction is not None and self.loss == "vespo":
            yield (
                'the kernel of loss = "vespo" is of the whole ratio to the sampler; remove correction and '
                "proximal"
            )
        elif self.correction is not None and not self.proximal:
            yield ("correction weighs the proximal policy against the sampler; set proximal to true")
