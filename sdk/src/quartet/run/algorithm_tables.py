"""The tables in [algorithm]: of a reference, of weights, of a penalty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from quartet.config import Config
from quartet.config.model import rule
from quartet.run.values import Count, NonNegative, Positive, PositiveCount, Text


class ReferenceConfig(Config):
    """A second model: what the policy must not leave too far behind, or the teacher that it learns from."""

    #: A model folder or hub id, held by the trainer; absent: the run's own base model.
    model: Text | None = None
    #: host:port of an inference service that serves it; then the trainer holds none.
    address: Text | None = None
    #: Optimizer steps between synchronisations with the policy; 0: frozen.
    sync_steps: Count = 0
    #: What the policy gets of it at a synchronisation.
    mixup_alpha: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None

    @pydantic.field_validator("address")
    @classmethod
    def _has_a_port(cls, address: str | None) -> str | None:
        if address is not None and not address.rpartition(":")[2].isdecimal():
            raise ValueError("it has no port; write host:port")
        return address

    @rule
    def _is_one(self) -> Iterator[str]:
        if self.model is not None and self.address is not None:
            yield "model is held by the trainer, address is served elsewhere; give one of the two"
        elsewhere = self.model is not None or self.address is not None
        if self.sync_steps and elsewhere:
            yield "another model does not follow the policy; leave out sync_steps"
        if self.mixup_alpha is not None and not self.sync_steps:
            yield "mixup_alpha is used at synchronisations; set sync_steps above 0, or remove it"


class CorrectionConfig(Config):
    """Weights for what lies between the sampler and the proximal policy."""

    #: Weights above the cap become the cap, or 0.
    mode: Literal["truncate", "mask"]
    #: Of each token, or one of a whole sample.
    level: Literal["token", "sequence"] = "token"
    #: The largest weight.
    cap: Positive = 2.0
    #: mode = "mask": smaller weights become 0, too.
    floor: NonNegative = 0.0

    @rule
    def _has_room(self) -> Iterator[str]:
        if self.floor and self.mode == "truncate":
            yield 'floor belongs to mode = "mask"; remove it'
        if self.floor >= self.cap:
            yield f"floor = {self.floor} leaves nothing below cap = {self.cap}; lower it"


class KernelConfig(Config):
    """loss = "vespo": a sample of ratio W weighs W^k * exp(lambda * (1 - W)), by its advantage's sign."""

    #: k where the advantage is above 0.
    k_positive: Positive = 2.0
    #: lambda where it is above 0.
    lambda_positive: Positive = 3.0
    #: k elsewhere.
    k_negative: Positive = 3.0
    #: lambda elsewhere.
    lambda_negative: Positive = 2.0


class OverlongPenaltyConfig(Config):
    """What long rollouts lose of their rewards: nothing up to `from_tokens`, `factor` from `to_tokens` on,
    between them in proportion (DAPO, arXiv 2503.14476, section 3.4)."""

    #: So many sampled tokens of a rollout cost nothing.
    from_tokens: Count
    #: So many, and more, cost all of it.
    to_tokens: PositiveCount
    #: What is taken from the reward then.
    factor: Positive = 1.0

    @rule
    def _rises(self) -> Iterator[str]:
        if self.to_tokens <= self.from_tokens:
            yield (
                f"to_tokens = {self.to_tokens} is not above from_tokens = {self.from_tokens}; set it to the "
                "length from which the whole penalty is due"
            )
